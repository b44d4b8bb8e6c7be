"""A loopback stand-in for a W&B server: enough of its protocol to start, resume, log and finish runs, to take media,
artifacts and workspaces, and to misbehave."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import quote, unquote

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
    files: dict[str, bytes] = field(default_factory=dict)  # media and the rest, by name

    @property
    def config(self):
        return {key: entry["value"] for key, entry in json.loads(self.fields["config"]).items()}

    @property
    def steps(self):
        """The steps of our rows, in the order in which they arrived; a row of pictures alone has none."""
        return [row["step"] for row in self.history if "step" in row]


@dataclass
class Artifact:
    """An artifact version: what it holds by path, once it is committed."""

    fields: dict[str, Any]
    manifest: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    committed: bool = False


class WandbServer(ThreadingHTTPServer):
    """Answers on 127.0.0.1; `behaviour` may be changed while it runs."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour: Behaviour = "ok"
        self.die_after_start: Behaviour | None = None  # the behaviour once a run has been accepted
        self.die_after_rows: tuple[int, Behaviour] | None = None  # the behaviour once a run has as many rows
        self.slow_seconds = SLOW_SECONDS
        self.artifacts: dict[str, Artifact] = {}  # by id
        self.views: dict[str, dict[str, Any]] = {}  # workspaces by id
        self.projects = {"nexus-ablate"}
        self.unknown: list[str] = []  # operations without an answer
        self.filters: list[dict[str, Any]] = []  # of each request for runs
        self.runs: dict[str, ServedRun] = {}
        self.requests = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """A client that went away is what these tests are about, not an error."""


@contextmanager
def serving(behaviour="ok"):
    server = WandbServer()
    server.behaviour = behaviour
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()


@contextmanager
def serving_alone(home, monkeypatch):
    """A server, and an environment and a working directory in which it is the only W&B."""
    _forget_wandb()  # what an earlier test of this process has set up knows another address
    for name in os.environ:
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    with serving() as server:
        folders = {"HOME": home, "NETRC": home / "netrc", "WANDB_CONFIG_DIR": home / "wandb_config"}
        for name, value in {**folders, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k3y" * 14}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.chdir(home)
        yield server
        _forget_wandb()  # else the next test's server would not be found


def _forget_wandb():
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self._serve({})

    def do_PUT(self):
        body = self._body()
        if self.server.behaviour in ("ok", "slow"):
            kind, owner, name = self.path.split("?")[0].removeprefix("/upload/").split("/", 2)
            with self.server.lock:
                kept = self.server.runs[owner].files if kind == "run" else self.server.artifacts[owner].files
                kept[unquote(name)] = body
        self._serve({})

    def do_POST(self):
        body = self._body()
        if self.path.endswith("/graphql"):
            call = json.loads(body)
            name = call.get("operationName") or re.findall(r"(?:query|mutation)\s+(\w+)", call["query"])[0]
            self._serve({"data": self._graphql(name, call.get("variables") or {})})
            if name == "UpsertBucket" and self.server.die_after_start:
                self.server.behaviour = self.server.die_after_start
        elif match := re.fullmatch(r"/files/[^/]+/([^/]+)/([^/]+)/file_stream", self.path):
            if self.server.behaviour in ("ok", "slow"):
                self._file_stream(self._key(match[1], match[2]), json.loads(body))
            self._serve({"exitcode": None, "limits": {}})
        else:
            self._serve({})

    def _body(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _serve(self, answer):
        self.server.requests += 1
        status = {"error": 500, "unauthorized": 401}.get(self.server.behaviour, 200)
        if self.server.behaviour == "silent":
            self.server.closing.wait()
            return
        if self.server.behaviour == "slow":
            time.sleep(self.server.slow_seconds)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _key(self, project, run_id):
        """The key of a run in `runs`: ids are unique in a project only."""
        first = self.server.runs.get(run_id)
        return run_id if first is None or first.fields.get("project") in (None, project) else f"{run_id}@{project}"

    def _file_stream(self, run_id, sent):
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
            if self.server.die_after_rows and len(run.history) >= self.server.die_after_rows[0]:
                self.server.behaviour = self.server.die_after_rows[1]
            if "complete" in sent:
                run.complete, run.exitcode = sent["complete"], sent.get("exitcode")

    def _graphql(self, name, variables):
        project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": "me"}}
        if name == "GetDefaultEntity":
            return {"viewer": {"id": "v", "entity": "me"}}
        if name in ("Viewer", "GetViewer"):  # the second is of wandb 0.28
            return {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if name in ("RunResumeStatus", "ModelRunResumeStatus"):
            return {"model": {**project, "bucket": self._resume(variables["project"], variables["name"])}}
        if name == "UpsertBucket":
            run_id = variables["name"]
            with self.server.lock:
                run = self.server.runs.setdefault(self._key(variables["project"], run_id), ServedRun())
                inserted = not run.fields
                run.fields.update({key: value for key, value in variables.items() if value is not None})
                run.complete = False
            bucket = {"id": "b", "name": run_id, "displayName": run.fields.get("displayName"), "description": ""}
            bucket |= {"config": run.fields.get("config", "{}"), "sweepName": None, "historyLineCount": 0}
            return {"upsertBucket": {"bucket": {**bucket, "project": project}, "inserted": inserted}}
        if name == "CreateRunFiles":
            owner = self._key(variables["project"], variables["run"])
            files = [self._upload("run", owner, f) for f in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if name == "RunStoppedStatus":
            return {"project": {"run": {"stopped": False}}}
        if name == "ProjectInternalId":
            return {"project": {"id": "p", "internalId": "p"}}
        with self.server.lock:
            if "Artifact" in name:
                return self._artifact(name, variables)
            if name in ("UpsertView2", "upsertView"):
                return self._upsert_view(variables)
            if name == "View":
                if variables["projectName"] not in self.server.projects:
                    return {"project": None}
                return {"project": {"allViews": self._views(variables["viewType"], variables["viewName"])}}
            if name == "ProjectViews":
                return {"project": {"allViews": self._views("runs", None)}}
            if name == "Runs":
                return {"project": self._runs(variables)}
            if name == "GetProjects":
                edges = [{"node": _project(name), "cursor": name} for name in sorted(self.server.projects)]
                page = {"endCursor": None, "hasNextPage": False}
                return {"models": {"totalCount": len(edges), "edges": edges, "pageInfo": page}}
            self.server.unknown.append(name)
        return {}

    def _upload(self, kind, owner, name):
        url = f"{self.server.url}/upload/{kind}/{owner}/{quote(name, safe='')}"
        return {"name": name, "uploadUrl": url, "uploadHeaders": []}

    def _artifact(self, name, variables):
        artifacts = self.server.artifacts
        if name == "ArtifactType":
            return {"project": None}
        if name == "CreateArtifact":
            key = f"artifact{len(artifacts)}"
            artifacts[key] = Artifact(variables["input"])
            sequence = {"id": f"sequence{len(artifacts)}", "latestArtifact": None}
            return {"createArtifact": {"artifact": {"id": key, "state": "PENDING", "artifactSequence": sequence}}}
        if name in ("CreateArtifactManifest", "UpdateArtifactManifest"):
            key = variables.get("artifactID") or variables["artifactManifestID"]
            file = {**self._upload("artifact", key, "wandb_manifest.json"), "id": "m", "displayName": "m"}
            manifest = {"id": key, "file": file}
            return {name[0].lower() + name[1:]: {"artifactManifest": manifest}}
        if name == "CreateArtifactFiles":
            files = []
            for entry in (
                variables["artifactFiles"] if "artifactFiles" in variables else variables["input"]["artifactFiles"]
            ):
                node = self._upload("artifact", entry["artifactID"], entry["name"])
                node |= {"id": "f", "displayName": entry["name"], "storagePath": None, "uploadMultipartUrls": None}
                files.append({"node": {**node, "artifact": {"id": entry["artifactID"]}}})
            return {"createArtifactFiles": {"files": {"edges": files}}}
        if name == "CommitArtifact":
            artifacts[variables["artifactID"]].committed = True
            return {"commitArtifact": {"artifact": {"id": variables["artifactID"], "digest": ""}}}
        self.server.unknown.append(name)
        return {}

    def _runs(self, variables):
        """A page of the runs of a project; of the filters only `{"group": NAME}` is understood."""
        if variables["project"] not in self.server.projects:
            return None
        filters = json.loads(variables.get("filters") or "{}")
        self.server.filters.append(filters)
        runs = [(key, run) for key, run in self.server.runs.items() if filters.get("group") in (None, _group(run))]
        begin = int(variables.get("cursor") or 0)
        end = begin + variables["perPage"]
        edges = [{"node": _node(key, run), "cursor": str(i)} for i, (key, run) in enumerate(runs[begin:end], begin + 1)]
        page = {"endCursor": str(end), "hasNextPage": end < len(runs)}
        counts = {"internalId": "p", "runCount": len(runs), "readOnly": False}
        return {**counts, "runs": {"edges": edges, "pageInfo": page}}

    def _views(self, kind, name):
        """The views of a kind: `project-view` is a workspace."""
        result = [v for v in self.server.views.values() if v["type"] == kind and name in (None, v["name"])]
        page = {"endCursor": None, "hasNextPage": False}
        return {"edges": [{"node": view, "cursor": view["id"]} for view in result], "pageInfo": page}

    def _upsert_view(self, variables):
        key = variables.get("id") or base64.b64encode(f"View:{len(self.server.views)}".encode()).decode()
        inserted = key not in self.server.views
        project = {"id": "p", "name": variables["projectName"], "entityName": variables["entityName"]}
        view = {**variables, "id": key, "project": project, "description": "", "updatedAt": "2026-01-01T00:00:00"}
        self.server.views[key] = view
        return {"upsertView": {"view": view, "inserted": inserted}}

    def _resume(self, project, run_id):
        run = self.server.runs.get(self._key(project, run_id))
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


def _group(run):
    return str(run.fields.get("groupName") or run.fields.get("group") or "")


def _node(key, run):
    """A run as the public API asks for it."""
    state = "running" if not run.complete else "crashed" if run.exitcode else "finished"
    created = "2026-01-01T00:00:00"
    return {
        "id": f"id-{key}", "name": key, "displayName": run.fields.get("displayName", key), "state": state,
        "config": run.fields.get("config", "{}"), "summaryMetrics": json.dumps(run.summary), "tags": [],
        "group": _group(run), "jobType": run.fields.get("jobType", "train"), "sweepName": None, "commit": None,
        "readOnly": False, "createdAt": created, "heartbeatAt": created, "description": "", "notes": "",
        "systemMetrics": "{}", "historyLineCount": len(run.history), "user": {"name": "me", "username": "me"},
        "historyKeys": {}, "projectId": "1",
    }  # fmt: skip


def _project(name):
    created = "2026-01-01T00:00:00"
    return {"id": name, "name": name, "entityName": "me", "createdAt": created, "isBenchmark": False, "user": None}
