"""What the commands print: in a terminal of 80 columns, and in a pipe."""

from __future__ import annotations

import io
import shlex

import pytest
from test_display import SUMMARY, Terminal
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.cli.verb import verb_names
from nexus_ablate.console import grid, middle, open_console, short_names, sparkline, without_shared
from nexus_ablate.report.columns import TextTable
from nexus_ablate.report.terminal import print_texts
from nexus_ablate.training import display
from nexus_ablate.training.display import Display

PARTS = ("norm=layer", "placement=sandwich", "position=learned", "qk_norm=rms", "weight_decay=0.3")
LONG = ",".join(PARTS)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """The folder of a study with a name too long for any table, finished, with one failed run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    writer = Writer(tmp_path / "runs", "mine")
    writer.arm(losses=[2.0, 2.01, 1.99])
    writer.arm(*PARTS, losses=[2.1, 2.12, 2.09])
    writer.run("norm=none", state="failed", folder="norm=none")
    return "runs/mine"


def printed(capsys, command):
    capsys.readouterr()
    assert main(shlex.split(command)) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("command", ["status runs/mine", "compare runs/mine", "compare runs/mine --details"])
def test_a_table_fits_into_eighty_columns_with_one_line_per_row(study, capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, command)
    assert max(len(line.rstrip()) for line in lines if "runs/mine" not in line) <= 80  # paths stay in one piece
    shortened = [line for line in lines if "…" in line]
    assert shortened
    if "--details" in command:
        return
    rows = [line for line in shortened if not line.startswith("measure ")]
    assert all(line.startswith("norm=layer,") and "=0.3  " in line for line in rows)  # both ends are there
    assert all("  norm=layer," in line and line.rstrip().endswith("=0.3") for line in shortened if line not in rows)


def test_a_pipe_gets_every_run_on_one_line_with_its_whole_name_and_no_colours(study, capsys):
    for command in ("status runs/mine", "compare runs/mine"):
        lines = printed(capsys, command)
        assert any(line.startswith(LONG) and "2.1" in line for line in lines)
        assert "\x1b" not in "".join(lines)


def test_shortened_names_stay_apart_and_short_ones_stay_whole():
    names = [f"placement=sandwich,model.n_layers={n},norm=layer" for n in range(3)]
    assert len(set(short_names(names, 20).values())) == 3
    assert all(len(name) <= 20 for name in short_names(names, 20).values())
    assert short_names(["norm=layer"], 10) == {"norm=layer": "norm=layer"}
    assert middle("abcdefghij", 5) == "ab…ij"


def test_only_what_differs_is_shown():
    names = ["model=mini,norm=layer", "model=mini", "model=mini,norm=dyt"]
    assert list(without_shared(names).values()) == ["norm=layer", "baseline", "norm=dyt"]
    assert without_shared(["model=mini"]) == {"model=mini": "model=mini"}
    assert without_shared(["baseline", "norm=dyt"]) == {"baseline": "baseline", "norm=dyt": "norm=dyt"}


def test_a_table_too_wide_for_its_terminal_keeps_its_numbers():
    from rich.console import Console

    console = Console(width=40, file=io.StringIO(), record=True)
    console.print(grid(("arm", "val loss", "delta"), [(LONG, "1.2345", "-0.1234")], 40))
    assert console.export_text().splitlines()[1].split()[1:] == ["1.2345", "-0.1234"]


def test_a_verdict_too_long_for_its_terminal_gives_way_to_its_number():
    from rich.console import Console

    console = Console(width=60, file=io.StringIO(), record=True)
    verdict = "exploratory: WORSE (below the threshold that matters, 1 of 6 failed)"
    heads, cells = ("arm", "verdict", "delta", "seeds"), ("norm=layer", verdict, "+0.0024", "5/6")
    console.print(grid(heads, [cells], 60, left=("verdict",)))
    row = console.export_text().splitlines()[1]
    assert row.split()[-2:] == ["+0.0024", "5/6"] and "exploratory: WORSE" in row and len(row) <= 60


def test_letters_of_two_cells_leave_the_numbers_whole():
    from rich.cells import cell_len
    from rich.console import Console

    console = Console(width=40, file=io.StringIO(), record=True)
    console.print(grid(("arm", "val loss", "delta"), [("規範化層" * 6, "1.2345", "-0.1234")], 40))
    row = console.export_text().splitlines()[1].rstrip()
    assert row.split()[1:] == ["1.2345", "-0.1234"] and cell_len(row) <= 40 and row.startswith("規") and "…" in row


def test_columns_without_room_are_left_out_in_their_order_rather_than_cut():
    from rich.console import Console

    heads, row = ("arm", "val loss", "age", "left"), (LONG, "1.2345", "12 min", "3 min")
    shown = {}
    for width in (60, 36, 28):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(grid(heads, [row], width, leave=("age", "left")))
        head, cells = console.export_text().splitlines()
        shown[width] = head.split()[3:]
        assert cells.count("…") == 1  # of the name
    assert shown == {60: ["age", "left"], 36: ["left"], 28: []}


def test_a_status_of_settings_in_eighty_columns_cuts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for setting in ("small-and-narrow", "large"):
        writer = Writer(tmp_path / "runs", f"mine@{setting}")
        writer.arm(losses=[2.0, 2.01])
        writer.arm("norm=layer", "placement=post", losses=[2.1, 2.12])
    lines = printed(capsys, "status runs/mine@small-and-narrow runs/mine@large")
    assert lines[0].split()[:2] == ["arm", "study"] and "val loss" in lines[0]
    rows = [line for line in lines if "finished" in line and "large" in line]
    assert len(rows) == 4
    assert all(line.count("…") <= 1 and "fin…" not in line for line in lines)


def test_a_cell_wider_than_its_terminal_is_cut_and_the_name_of_its_row_is_not(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    table = TextTable(["kind", "not right"], [["regularization", "a change with a long name, " * 5]], ["not right"])
    print_texts(table, open_console())
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "…" in line]
    assert row.startswith("regularization  ") and len(row.rstrip()) <= 80


@pytest.mark.parametrize(
    ("columns", "present", "absent"), [("80", (), ("lr", "grad")), ("120", ("lr 1.0e-03", "grad 1234.56"), ())]
)
def test_the_bar_always_has_speed_and_time_left(monkeypatch, columns, present, absent):
    monkeypatch.setenv("COLUMNS", columns)
    stream = Terminal()
    shown = Display(stream)
    shown.start(200_000, 100_000)
    monkeypatch.setattr(display.time, "monotonic", lambda: 1e9)
    shown.advance(123_456, 2.0, 1e-3, 1234.56, 1234567.0)
    bar = stream.getvalue().split("\r")[-1]
    shown.stop()
    for part in ("123456/200000", "left", "loss 2.000", "1234.6k tok/s", *present):
        assert part in bar
    assert not any(part in bar for part in absent)
    assert len(bar) <= int(columns)


def test_a_result_leads_with_loss_and_curve_and_keeps_memory_for_verbose(tmp_path, monkeypatch):
    run = Writer(tmp_path / "runs", "mine").run(loss=2.0)

    def lines():
        stream = io.StringIO()
        Display(stream).after(run, SUMMARY)
        return stream.getvalue().splitlines()

    assert [line.split("  ")[0].strip() for line in lines()[:3]] == ["val loss", "val bits/byte", "curve"]
    assert "█" in lines()[2] and "2.00 validation loss" in lines()[2]
    assert not any(line.startswith("memory") for line in lines())
    monkeypatch.setattr(display, "verbose", True)
    assert any(line.startswith("memory") for line in lines())


def test_a_sparkline_runs_from_the_highest_to_the_lowest_block():
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([1.0, None, float("nan")]) == ""
    assert len(sparkline(range(1000))) == 32


def test_without_words_the_command_prints_its_help_and_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = printed(capsys, "")
    assert lines[0].startswith("nexus-ablate: ")
    assert any(line.startswith("  nexus-ablate train ") for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", *verb_names()])
def test_help_fits_into_eighty_columns(capsys, name):
    assert max(map(len, printed(capsys, f"{name} --help"))) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("swept", ["norm=layer,batch", "norm=layer,rms"])
def test_the_last_line_of_a_multirun_compares_its_arms_even_if_none_is_the_default(
    tiny_run, tmp_path, capfd, monkeypatch, swept
):
    monkeypatch.chdir(tmp_path)
    assert main(["-m", *tiny_run("train.steps=4"), swept, "seed=0,1"]) == 0
    start, command = capfd.readouterr().err.splitlines()[-1].split("nexus-ablate ")
    assert start == "next  "
    assert main([*shlex.split(command), "--csv", "-"]) == 0, capfd.readouterr().err


@pytest.mark.slow
def test_a_study_names_each_job_and_ends_with_the_next_command(tiny_run, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = [text for text in tiny_run("train.steps=4") if not text.startswith("train.threads")]
    assert main(["study", "mine", "vary.norm=layer", "seeds=0,1", *base, "--workers", "1"]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("job 2/4  norm=layer  seed 0  val loss ") for line in lines)
    assert lines[-2].startswith("4 of 4 runs finished; this launch took ")
    assert lines[-1] == "next  nexus-ablate compare runs/mine"
