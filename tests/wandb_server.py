"""A loopback stand-in for a W&B server: enough of its protocol to start, resume, log and finish, or to misbehave."""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Behaviour = Literal["ok", "error", "unauthorized", "silent", "slow"]
SLOW_SECONDS = 1.0


@dataclass
class ServedRun:
    """What the server knows of one run."""

    fields: dict[str, Any] = field(default_factory=dict)  # the variables of UpsertBucket
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    exitcode: int | None = None
    preempting: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return {key: entry["value"] for key, entry in json.loads(self.fields["config"]).items()}


class WandbServer(ThreadingHTTPServer):
    """Answers on 127.0.0.1; `behaviour` may be changed while it runs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour: Behaviour = "ok"
        self.die_after_start: Behaviour | None = None  # the behaviour once a run has been accepted
        self.runs: dict[str, ServedRun] = {}
        self.requests = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what these tests are about, not an error."""


@contextmanager
def serving(behaviour: Behaviour = "ok") -> Iterator[WandbServer]:
    server = WandbServer()
    server.behaviour = behaviour
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve({})

    def do_PUT(self) -> None:
        self._body()
        self._serve({})

    def do_POST(self) -> None:
        body = self._body()
        if self.path.endswith("/graphql"):
            call = json.loads(body)
            name = call.get("operationName") or re.findall(r"(?:query|mutation)\s+(\w+)", call["query"])[0]
            self._serve({"data": self._graphql(name, call.get("variables") or {})})
            if name == "UpsertBucket" and self.server.die_after_start:
                self.server.behaviour = self.server.die_after_start
        elif match := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            if self.server.behaviour in ("ok", "slow"):
                self._file_stream(match[1], json.loads(body))
            self._serve({"exitcode": None, "limits": {}})
        else:
            self._serve({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _serve(self, answer: dict[str, Any]) -> None:
        self.server.requests += 1
        status = {"error": 500, "unauthorized": 401}.get(self.server.behaviour, 200)
        if self.server.behaviour == "silent":
            self.server.closing.wait()
            return
        if self.server.behaviour == "slow":
            time.sleep(SLOW_SECONDS)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _file_stream(self, run_id: str, sent: dict[str, Any]) -> None:
        with self.server.lock:
            run = self.server.runs.setdefault(run_id, ServedRun())
            files = sent.get("files") or {}
            if "wandb-history.jsonl" in files:
                chunk = files["wandb-history.jsonl"]
                rows = [json.loads(line) for line in chunk["content"]]
                run.history[chunk["offset"] : chunk["offset"] + len(rows)] = rows
            if "wandb-summary.json" in files:
                run.summary = json.loads(files["wandb-summary.json"]["content"][-1])
            run.preempting |= bool(sent.get("preempting"))
            if "complete" in sent:
                run.complete, run.exitcode = sent["complete"], sent.get("exitcode")

    def _graphql(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}}
        if name == "Viewer":
            return {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if name in ("RunResumeStatus", "ModelRunResumeStatus"):
            return {"model": {**project, "bucket": self._resume(variables["name"])}}
        if name == "UpsertBucket":
            run_id = variables["name"]
            with self.server.lock:
                run = self.server.runs.setdefault(run_id, ServedRun())
                inserted = not run.fields
                run.fields.update({key: value for key, value in variables.items() if value is not None})
                run.complete = False
            bucket = {"id": "b", "name": run_id, "displayName": run.fields.get("displayName"), "description": ""}
            bucket |= {"config": run.fields.get("config", "{}"), "sweepName": None, "historyLineCount": 0}
            return {"upsertBucket": {"bucket": {**bucket, "project": project}, "inserted": inserted}}
        if name == "CreateRunFiles":
            files = [{"name": f, "uploadUrl": f"{self.server.url}/upload/{f}"} for f in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if name == "RunStoppedStatus":
            return {"project": {"run": {"stopped": False}}}
        return {}

    def _resume(self, run_id: str) -> dict[str, Any] | None:
        run = self.server.runs.get(run_id)
        if run is None or not run.fields:
            return None
        return {
            "id": "b",
            "name": run_id,
            "displayName": run.fields.get("displayName"),
            "historyLineCount": len(run.history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]),
            "eventsTail": "[]",
            "summaryMetrics": json.dumps(run.summary),
            "config": run.fields.get("config", "{}"),
            "tags": run.fields.get("tags"),
            "wandbConfig": json.dumps({"t": 1}),
        }
