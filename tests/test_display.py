import contextlib
import io
import os

import pytest

from nexus_ablate.cli import main
from nexus_ablate.training import display
from nexus_ablate.training.display import Display, result_facts

SUMMARY = {
    "val_loss": 1.38,
    "best_val_loss": 1.37,
    "val_bpb": 2.0,
    "unigram_bpb": 5.0,
    "seconds": 100.0,
    "tokens_per_second": 16000.0,
    "seconds_eval": 1.0,
    "seconds_probe": 1.0,
    "seconds_checkpoint": 1.0,
    "peak_memory_bytes": 2**29,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_run_goes_on_when_the_reader_of_its_messages_has_gone():
    reader, writer = os.pipe()
    os.close(reader)
    stream = open(writer, "w")  # noqa: SIM115
    shown = Display(stream)
    shown.say("step 1")
    shown.say("step 2")
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_without_a_terminal_there_is_a_line_every_thirty_seconds_and_no_bar(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    shown = Display(stream)
    shown.start(100, 0)
    for step in range(1, 101):
        clock[0] += 1.0
        shown.advance(step, 2.0, 1e-3, 0.5, 1000.0)
    shown.stop()
    assert len(stream.getvalue().splitlines()) == 3
    assert "step 30/100 loss 2.0000" in stream.getvalue()


def test_a_line_said_during_the_bar_is_a_line_of_its_own():
    stream = Terminal()
    shown = Display(stream)
    shown.start(4, 0)
    shown.say("something to know")
    shown.stop()
    assert "something to know\n" in stream.getvalue()


def test_quiet_shows_nothing(capsys):
    shown = Display(quiet=True)
    shown.say("nothing")
    shown.before({"arm": "x"})
    assert capsys.readouterr() == ("", "")


def test_what_the_user_named_is_shown_as_text_and_not_as_markup_or_escapes(tmp_path):
    stream = io.StringIO()
    Display(stream).before({"arm": "[red]x[/nothing]\x1b[31m"})
    assert "[red]x[/nothing]\\x1b[31m" in stream.getvalue()


def test_the_result_names_loss_baseline_and_the_next_command(tmp_path):
    stream = io.StringIO()
    Display(stream).after(tmp_path, SUMMARY)
    assert "60% lower than a unigram model" in stream.getvalue()
    assert "warning" not in result_facts(SUMMARY)
    above = result_facts(SUMMARY | {"val_bpb": SUMMARY["unigram_bpb"] * 0.91})["warning"]
    assert "is not clearly better than knowing how frequent each token is" in above and "try train.steps=auto" in above
    assert "25% higher than" in result_facts(SUMMARY | {"val_bpb": SUMMARY["unigram_bpb"] * 1.25})["val bits/byte"]
    assert f"nexus-ablate show {tmp_path}" in stream.getvalue()
    gaps = {
        gap: result_facts(SUMMARY | {"train_loss": 1.4, "generalization_gap": gap})["train loss"]
        for gap in (-0.04, 0.04, None)
    }
    assert [("validation text is easier" in text) for text in gaps.values()] == [True, False, False]
    Display(stream).after(tmp_path / "my run", SUMMARY)
    assert f"nexus-ablate show '{tmp_path}/my run'" in stream.getvalue(), "as a shell reads it"
    assert "outliers" not in result_facts(SUMMARY)  # not probed: absent, not zero


def test_a_figure_that_is_not_finite_is_said_to_be_so_in_memory_and_read_back():
    for value in (float("inf"), None):
        unbounded = SUMMARY | dict.fromkeys(("val_loss", "val_bpb", "best_val_loss"), value)
        assert result_facts(unbounded)["val loss"] == "not finite nats per token (best not finite)"


@pytest.mark.parametrize(("overrides", "noted"), [(["placement=deepnorm"], ["init"]), ([], [])])
def test_the_table_before_a_run_says_what_auto_changed(tiny_run, capsys, overrides, noted):
    assert main(tiny_run(*overrides)) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note ")]
    assert len(notes) == len(noted)
    assert all(word in note for word, note in zip(noted, notes, strict=True))
