# SPDX-License-Identifier: Apache-2.0
"""Tests of sked, and what they run against.

    ApiServer        a Kubernetes API server in memory that speaks real HTTP and authorises by
                     install.yaml
    Kubelets         plays the DaemonSet controller and the nodes on an ApiServer
    RealCluster      the cluster that $SKED_TEST_KUBECONFIG names, for what only a real one shows
    World            SchedExts, on either of them, and a sked in this process
    OperatorProcess  sked.py in a process of its own

    python test_sked.py   shows sked at work, in a minute and without a cluster

An obj is an object as the plain dict that the API returns; stored objects are never changed, only
replaced. The server does only what a test or the demo needs. Where a real server differs, the real
one is right.
"""

from __future__ import annotations

import atexit
import base64
import bisect
import collections
import contextlib
import functools
import hashlib
import http.server
import importlib.util
import inspect
import itertools
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import urllib3
import yaml

import sked

pytestmark = pytest.mark.filterwarnings("ignore:Unverified HTTPS request")

HERE = Path(__file__).resolve().parent
RUSTY = "ghcr.io/schedkit/scx_rusty:latest"
LAVD = "ghcr.io/schedkit/scx_lavd:latest"


def now(ago: float = 0.0) -> str:
    """The time this many seconds ago, in the API's format."""
    moment = datetime.fromtimestamp(time.time() - ago, timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_ago(timestamp: str) -> float:
    return time.time() - sked.unix_time(timestamp)


def copy(value: Any) -> Any:
    """A deep copy of anything that JSON can express."""
    return json.loads(json.dumps(value))


def python(*args: str, text: str = "") -> str:
    """Runs another Python and returns what it prints, errors included."""
    command = [sys.executable, *args]
    done = subprocess.run(command, cwd=HERE, input=text, capture_output=True, text=True)
    return done.stdout + done.stderr


def dig(value: Any, path: str) -> Any:
    """The value at a path such as a.b.0.c, or None."""
    try:
        for step in path.split("."):
            value = value[int(step) if step.isdecimal() else step]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def condition_of(obj: dict, kind: str) -> dict:
    """A condition in an object's status, or {}."""
    return sked.condition(obj.get("status", {}), kind)


def eventually(look: Callable[[], Any], wanted: Any = bool, seconds: float = 60.0) -> Any:
    """Waits until look() gives what is wanted, and returns it; fails after the deadline.

    Wanted is a value, or a function that judges one: by default, anything that is true will do.
    """
    deadline = time.monotonic() + seconds
    while True:
        seen = look()
        if wanted(seen) if callable(wanted) else seen == wanted:
            return seen
        if time.monotonic() > deadline:
            expected = "" if callable(wanted) else f"; wanted: {wanted!r}"
            pytest.fail(f"not within {seconds} s; last seen: {seen!r}{expected}")
        time.sleep(0.02)


def nothing(seen: Any) -> bool:
    return not seen


def contains(words: str) -> Callable[[Any], bool]:
    return lambda seen: words in seen


def at_least(least: float) -> Callable[[Any], bool]:
    return lambda seen: seen >= least


@functools.cache  # YAML is slow to parse
def manifests() -> list[dict]:
    """The objects in install.yaml."""
    return list(yaml.safe_load_all((HERE / "install.yaml").read_text()))


def installed_one(kind: str) -> dict:
    (found,) = [obj for obj in manifests() if obj["kind"] == kind]
    return found


SCHEMA = dig(installed_one("CustomResourceDefinition"), "spec.versions.0.schema.openAPIV3Schema")


def installed() -> list[dict]:
    """The objects to install before a test; the test runs the operator itself."""
    served = {resource.kind for resource in BUILT_IN.values()}
    return [obj for obj in copy(manifests()) if obj["kind"] in served]


# ---------------------------------------------------------------- resources and refusals


class Refusal(Exception):
    """A 4xx or 5xx answer."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def status(self) -> dict:
        return {"kind": "Status", "message": str(self), "code": self.code}


class Resource(NamedTuple):
    """One kind of object; all are served as v1, with a generation and a status subresource."""

    plural: str
    kind: str
    group: str = ""
    namespaced: bool = True
    schema: dict | None = None  # of a custom resource

    @property
    def api_version(self) -> str:
        return f"{self.group}/v1" if self.group else "v1"

    @property
    def root(self) -> str:
        return f"/apis/{self.api_version}" if self.group else "/api/v1"

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        scope = f"namespaces/{namespace}" if self.namespaced and namespace else ""
        return "/".join(filter(None, (self.root, scope, self.plural, name, subresource)))

    def called(self, name: str) -> str:
        """An object's name in messages: daemonsets.apps "x"."""
        what = f"{self.plural}.{self.group}" if self.group else self.plural
        return f'{what} "{name}"' if name else what


RBAC = "rbac.authorization.k8s.io"
REVIEWS = ("tokenreviews", "subjectaccessreviews")
NAMESPACED = """
pods Pod
events Event
serviceaccounts ServiceAccount
daemonsets DaemonSet apps
leases Lease coordination.k8s.io
roles Role rbac.authorization.k8s.io
rolebindings RoleBinding rbac.authorization.k8s.io
"""
CLUSTER_WIDE = """
namespaces Namespace
nodes Node
customresourcedefinitions CustomResourceDefinition apiextensions.k8s.io
clusterroles ClusterRole rbac.authorization.k8s.io
clusterrolebindings ClusterRoleBinding rbac.authorization.k8s.io
validatingadmissionpolicies ValidatingAdmissionPolicy admissionregistration.k8s.io
validatingadmissionpolicybindings ValidatingAdmissionPolicyBinding admissionregistration.k8s.io
tokenreviews TokenReview authentication.k8s.io
subjectaccessreviews SubjectAccessReview authorization.k8s.io
"""
BUILT_IN = {
    row.split()[0]: Resource(*row.split(), namespaced=rows is NAMESPACED)
    for rows in (NAMESPACED, CLUSTER_WIDE)
    for row in rows.strip().splitlines()
}


def schedexts() -> Resource:
    """The resource that the CRD defines, with a schema that may be changed."""
    return Resource("schedexts", "SchedExt", "sked.schedkit.io", schema=copy(SCHEMA))


# ---------------------------------------------------------------- the CRD's schema

TYPES = {str: "string", int: "integer", bool: "boolean", float: "number", list: "array"}


def check(schema: dict, value: Any, path: str, causes: list[str]) -> Any:
    """The value as it is stored, with the schema's defaults; appends what is wrong to causes.

    Understands everything that the CRD uses except rules in CEL (x-kubernetes-validations).
    """
    found = TYPES.get(type(value), "object")
    either = "x-kubernetes-int-or-string" in schema
    wanted = "integer,string" if either else schema.get("type", found)
    at = path.lstrip(".")
    if found not in wanted.split(","):
        causes.append(f'{at} in body must be of type {wanted}: "{found}"')
        return value
    causes += broken_limits(schema, value, at)
    if found == "array":
        items = schema["items"]
        return [check(items, item, f"{path}[{i}]", causes) for i, item in enumerate(value)]
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    if found != "object" or not (known or others):  # a plain value, or metadata
        return value
    fields = {name: item for name, item in value.items() if item is not None}
    for name, field_schema in known.items():
        if "default" in field_schema:
            fields.setdefault(name, copy(field_schema["default"]))
    missing = [name for name in schema.get("required", ()) if name not in fields]
    causes += [f"{at}.{name}".lstrip(".") + ": Required value" for name in missing]
    for name, item in fields.items():
        inner = f"{path}.{name}"
        if field_schema := known.get(name, others):
            fields[name] = check(field_schema, item, inner, causes)
        else:
            causes.append(f'unknown field "{inner.lstrip(".")}"')
    return fields


def broken_limits(schema: dict, value: Any, at: str) -> Iterator[str]:
    """What a schema's limits say about a value of the right type."""
    invalid = f"{at} in body should"
    if value not in schema.get("enum", [value]):
        yield f"{at}: Unsupported value: {json.dumps(value)}"
    if isinstance(value, str):
        if len(value) > schema.get("maxLength", math.inf):
            yield f"{at}: Too long: may not be more than {schema['maxLength']} bytes"
        if len(value) < schema.get("minLength", 0):
            yield f"{invalid} be at least {schema['minLength']} chars long"
        if not re.search(schema.get("pattern", "").replace("$", r"\Z"), value):
            yield f"{invalid} match '{schema['pattern']}'"
    elif isinstance(value, int) and value < schema.get("minimum", -math.inf):
        yield f"{invalid} be greater than or equal to {schema['minimum']}"
    elif isinstance(value, (list, dict)):
        most = schema.get("maxItems", schema.get("maxProperties", math.inf))
        if len(value) > most:
            yield f"{at}: Too many: {len(value)}: must have at most {most} items"
    if schema.get("x-kubernetes-list-type") in ("map", "set"):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        names = [[item.get(key) for key in keys] if keys else item for item in value]
        yield from (f"{at}[{i}]: Duplicate value" for i, n in enumerate(names) if n in names[:i])


# ---------------------------------------------------------------- DaemonSets and pods: defaults


def default_pod(spec: dict) -> dict:
    """A pod's spec with the API server's defaults."""
    return {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "securityContext": {},
        "schedulerName": "default-scheduler",
        **spec,
        "containers": [default_container(container) for container in spec["containers"]],
    }


def default_container(container: dict) -> dict:
    image, _, digest = container["image"].partition("@")
    tag = image.rpartition("/")[2].partition(":")[2]
    latest = tag == "latest" or not (tag or digest)
    return {
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "Always" if latest else "IfNotPresent",
        "resources": {},
        **container,
    }


def default_daemonset(obj: dict) -> None:
    """Fills in the API server's defaults."""
    spec = obj["spec"]
    strategy = {"type": "RollingUpdate"} | spec.get("updateStrategy", {})
    if strategy["type"] == "RollingUpdate":
        rolling = {"maxUnavailable": 1, "maxSurge": 0} | strategy.get("rollingUpdate", {})
        strategy["rollingUpdate"] = rolling
    template = spec["template"] | {"spec": default_pod(spec["template"]["spec"])}
    filled = {"updateStrategy": strategy, "template": template}
    obj["spec"] = {"revisionHistoryLimit": 10} | spec | filled


TEMPLATE_GENERATION = "deprecated.daemonset.template.generation"


def count_template(obj: dict, old: dict | None) -> None:
    """Maintains the annotation that counts changes to the template."""
    before = int(old["metadata"]["annotations"][TEMPLATE_GENERATION]) if old else 0
    is_new = not old or obj["spec"]["template"] != old["spec"]["template"]
    notes = obj["metadata"].setdefault("annotations", {})
    notes[TEMPLATE_GENERATION] = str(before + is_new)


# ---------------------------------------------------------------- the API server


def merge(old: Any, patch: Any) -> Any:
    """Applies a JSON merge patch to a value: null removes."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


@dataclass
class Request:
    """One request, kept as a record afterwards."""

    method: str
    path: str
    user: str
    query: dict[str, str] = field(default_factory=dict)
    kind: Resource | None = None
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    verb: str = ""
    manager: str = ""  # who writes, as managedFields name it
    status: int = 0  # of the answer; stays 0 if a fault swallowed it
    time: float = field(default_factory=time.time)

    @property
    def resource(self) -> str:
        return self.kind.plural if self.kind else ""

    @property
    def what(self) -> str:
        """The resource as RBAC names it, with the subresource."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource

    @property
    def deed(self) -> str:
        """Verb and resource, such as 'patch schedexts/status'."""
        return f"{self.verb} {self.what}"


@dataclass(eq=False)
class Fault:
    """A misbehaviour: which requests it hits, how many of them, and what it does to them.

    error     answers with a status
    garbage   answers 200 with something that is not JSON
    lose      does what is asked, then closes the connection without an answer
    truncate  closes the connection in the middle of the answer
    stall     goes silent in the middle of the answer until cleared
    hang      does nothing and sends nothing until cleared
    """

    method: str
    path: str  # a regular expression, searched in path and query
    times: int | None = 1  # None: until clear()
    action: str = "error"
    status: int = 500
    hits: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def matches(self, method: str, path: str) -> bool:
        fits = self.method == method and re.search(self.path, path)
        return bool(fits) and not self.over.is_set() and self.hits != self.times

    def clear(self) -> None:
        self.over.set()


NO_FAULT = Fault("", "", action="none")


class Change(NamedTuple):
    version: int
    obj: dict | None  # None: it was deleted
    old: dict | None


class Client:
    """What a test can ask of an ApiServer or a RealCluster; raises a Refusal if it refuses."""

    resources: Any  # Resources, by their plural
    call: Callable[..., Any]  # with method, path and body

    def kind_of(self, obj: dict) -> Resource:
        return next(kind for kind in self.resources.values() if kind.kind == obj["kind"])

    def create(self, obj: dict) -> dict:
        namespace = obj["metadata"].get("namespace", "default")
        return self.call("POST", self.kind_of(obj).path(namespace), obj)

    def get(self, resource: str, namespace: str, name: str) -> dict | None:
        """The object, or None if it does not exist."""
        try:
            return self.call("GET", self.resources[resource].path(namespace, name))
        except Refusal as refusal:
            if refusal.code == 404:
                return None
            raise

    def list(self, resource: str, namespace: str = "") -> list[dict]:
        return self.call("GET", self.resources[resource].path(namespace))["items"]

    def patch(self, resource: str, namespace: str, name: str, patch: dict, sub: str = "") -> dict:
        return self.call("PATCH", self.resources[resource].path(namespace, name, sub), patch)

    def delete(self, resource: str, namespace: str, name: str, policy: str = "Background") -> dict:
        """Foreground: the object stays until everything that it owns is gone."""
        options = {"gracePeriodSeconds": 0, "propagationPolicy": policy}
        return self.call("DELETE", self.resources[resource].path(namespace, name), options)


PATH = re.compile(
    r"(?P<root>/api/v1|/apis/[^/]+/v1)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>[^/]+))?"
)
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
FOREGROUND = "foregroundDeletion"  # the finalizer of an object that waits for what it owns
FIXED = ("uid", "creationTimestamp", "generation")  # as far as clients are concerned


class ApiServer(Client, contextlib.AbstractContextManager):
    """A Kubernetes API server in memory, on 127.0.0.1, with install.yaml applied.

    Its users: "admin" and "other" may do everything, "sked" what install.yaml grants the operator's
    service account, and "nobody" has no permissions. A user's token is its name.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self.port = 0
        self.resources = BUILT_IN | {"schedexts": schedexts()}
        self.changed = threading.Condition(threading.RLock())  # guards everything below
        self.objects = collections.defaultdict(dict)  # by resource, then by namespace and name
        self.log = collections.defaultdict(list)  # of Changes, by resource
        self.version = 1000
        self.epoch = 0  # a watch ends with its epoch
        self.requests = []
        self.bugs = set()  # exceptions that a thread has survived
        self.faults = []
        self.connections = set()
        self.tokens = {user: user for user in ("admin", "other", "sked", "nobody")}
        self.webhook = None  # takes a Request and an object; returns the object to store
        self.bookmark_seconds = 60.0
        self.stopping = threading.Event()
        self.thawed = threading.Event()
        self.thawed.set()
        self.temporary = tempfile.TemporaryDirectory(prefix="sked-")  # goes with the process, too
        self.folder = Path(self.temporary.name)
        for obj in installed():
            self.create(obj)
        self.requests.clear()
        self.start_listening()
        self.keep_doing(self.collect_garbage)

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for fault in self.faults:
            fault.clear()
        self.thaw()
        self.stop_listening()
        self.temporary.cleanup()

    def namespace(self) -> str:
        return "default"

    def kubeconfig(self, user: str = "sked", certificate: bool = False) -> Path:
        """The path of a kubeconfig for a user with a token or a client certificate."""
        cluster = {"server": f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"}
        if self.tls:
            cluster["certificate-authority-data"] = encoded(authority() / "ca.crt")
        credentials = {"token": user}
        if certificate:
            names = ("client-certificate-data", "client-key-data")
            signed = sign(user, "extendedKeyUsage=clientAuth")
            credentials = dict(zip(names, map(encoded, signed), strict=True))
        path = self.folder / f"{user}.kubeconfig"
        return write_kubeconfig(path, "sked", {"sked": cluster}, credentials)

    def report_bug(self, where: str) -> None:
        """Logs the current exception, once; the fixture fails a test that brought one about."""
        bug = f"{where}: {sys.exc_info()[1]!r}"
        if bug not in self.bugs:  # a kubelet would repeat it many times a second
            self.bugs.add(bug)
            logging.exception("%s: this is a bug of the stand-in for a cluster, not of sked", where)

    def keep_doing(self, step: Callable[[], None]) -> None:
        """Starts a thread that takes this step again and again, until the server goes away."""

        def run() -> None:
            while not self.stopping.wait(0.03):
                with self.changed:
                    try:
                        step()
                    except Exception:  # must not end the thread: sked would seem to have stopped
                        self.report_bug(step.__qualname__)

        threading.Thread(target=run, daemon=True).start()

    # -- misbehaviour

    def fault(self, *args: Any, **more: Any) -> Fault:
        """Adds a Fault with these arguments."""
        self.faults.append(Fault(*args, **more))
        return self.faults[-1]

    def next_fault(self, method: str, path: str) -> Fault:
        with self.changed:
            hit = next((fault for fault in self.faults if fault.matches(method, path)), NO_FAULT)
            hit.hits += 1
            return hit

    def freeze(self) -> None:
        """Accepts connections but answers nothing, watches included."""
        self.thawed.clear()

    def thaw(self) -> None:
        self.thawed.set()

    def drop_connections(self) -> None:
        """Cuts every connection, watches included."""
        with self.changed:  # so that no watch can end cleanly before its connection is cut
            self.epoch += 1
            self.changed.notify_all()
            for connection in list(self.connections):
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS or not

    def stop_listening(self) -> None:
        """Goes down: cuts all connections and refuses new ones."""
        self.http.shutdown()
        self.http.server_close()
        self.drop_connections()

    def start_listening(self) -> None:
        """Comes up, on the same port as before."""
        self.http = HttpServer(self)
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    # -- for tests: as admin, without HTTP

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return copy(self.serve(self.parse(method, path, "admin"), copy(body)))

    def writes(self, since: float = 0.0, user: str = "sked") -> list[Request]:
        """A user's writes since then (a time.time()), including refused ones."""
        sent = [r for r in list(self.requests) if r.user == user and r.time >= since]
        return [r for r in sent if r.method != "GET"]

    def deeds(self) -> list[str]:
        """What sked has asked for."""
        return [request.deed for request in list(self.requests) if request.user == "sked"]

    def set_default(self, field: str, value: Any) -> None:
        """Changes the CRD: a field of a new SchedExt's spec gets this default."""
        spec = self.resources["schedexts"].schema["properties"]["spec"]
        spec["properties"][field]["default"] = value

    # -- who may do what

    def authenticate(self, token: str, certificate: dict | None) -> str:
        """The user with this bearer token or client certificate."""
        if certificate and not token:
            return dict(pair for (pair,) in certificate["subject"])["commonName"]
        if token not in self.tokens:
            raise Refusal(401, "Unauthorized")
        return self.tokens[token]

    def rules(self, user: str) -> Iterator[tuple[str, dict]]:
        """(namespace or "" for all, rule) for every rule that is bound to the user."""
        subject = SKED if user == "sked" else {"kind": "User", "name": user}
        for plural in ("clusterrolebindings", "rolebindings"):
            for (namespace, _), binding in self.objects[plural].items():
                role = binding["roleRef"]
                scope = namespace if role["kind"] == "Role" else ""
                found = self.objects[f"{role['kind'].lower()}s"][scope, role["name"]]
                if any(subject.items() <= bound.items() for bound in binding["subjects"]):
                    for rule in found["rules"]:
                        yield namespace, rule

    def allowed(self, user: str, namespace: str = "", name: str = "", **asked: str) -> bool:
        """Whether a user may do this, in the terms of a rule: verbs="get" and so on."""
        return user in ("admin", "other") or any(
            all(value in rule.get(part, ()) for part, value in asked.items())
            for where, rule in self.rules(user)
            if where in ("", namespace) and name in rule.get("resourceNames", [name])
        )

    def require_permission(self, request: Request) -> None:
        """Refuses a request if its user may not do this."""
        kind, name, verb, what = request.kind, request.name, request.verb, request.what
        asked = {"verbs": verb, "apiGroups": kind.group, "resources": what}
        if not self.allowed(request.user, request.namespace, name, **asked):
            why = f'User "{request.user}" cannot {verb} resource "{what}"'
            raise Refusal(403, f"{kind.called(name)} is forbidden: {why}")

    def review(self, spec: dict) -> dict:
        """The status of a TokenReview or a SubjectAccessReview."""
        if "token" in spec:
            user = self.tokens.get(spec["token"])
            return {"authenticated": True, "user": {"username": user}} if user else {"user": {}}
        asked = spec["nonResourceAttributes"]
        allowed = self.allowed(spec["user"], verbs=asked["verb"], nonResourceURLs=asked["path"])
        return {"allowed": allowed}

    # -- requests

    def parse(self, method: str, target: str, user: str, agent: str = "") -> Request:
        path, _, query = target.partition("?")
        request = Request(method, target, user, dict(urllib.parse.parse_qsl(query)))
        request.manager = request.query.get("fieldManager") or agent.partition("/")[0] or user
        found = PATH.fullmatch(path)
        kind = self.resources.get(found["plural"]) if found else None
        if kind and kind.root == found["root"]:
            request.kind = kind
            _, request.namespace, _, request.name, request.subresource = found.groups("")
            reading = "watch" if "watch" in request.query else "list"
            request.verb = VERBS.get(method, "get" if request.name else reading)
        return request

    def serve(self, request: Request, body: Any) -> Any:
        """The answer: a dict, or the events of a watch. Records the request."""
        request.status = 201 if request.verb == "create" else 200
        try:
            with self.changed:
                kind = request.kind
                if not kind or request.subresource not in ("", "status"):
                    what = request.what or request.path
                    raise Refusal(404, f"this stand-in for an API server does not serve {what}")
                self.require_permission(request)
                action = getattr(self, f"do_{request.verb}")
                return action(request) if request.method == "GET" else action(request, body)
        except Refusal as refusal:
            request.status = refusal.code
            raise
        finally:
            self.requests.append(request)

    def find(self, request: Request) -> dict:
        found = self.objects[request.resource].get((request.namespace, request.name))
        if not found:
            raise Refusal(404, f"{request.kind.called(request.name)} not found")
        return found

    def concerns(self, request: Request, obj: dict | None) -> bool:
        """Whether an object belongs in this list or watch."""
        if not obj or request.namespace not in ("", obj["metadata"].get("namespace")):
            return False
        label, _, value = request.query.get("labelSelector", "").partition("=")
        return not label or obj["metadata"].get("labels", {}).get(label) == value

    def do_get(self, request: Request) -> dict:
        return self.find(request)

    def do_list(self, request: Request) -> dict:
        stored = sorted(self.objects[request.resource].items())
        items = [obj for _, obj in stored if self.concerns(request, obj)]
        if not request.kind.schema:  # in lists, only custom resources have a kind
            bare = ("kind", "apiVersion")
            items = [{k: v for k, v in obj.items() if k not in bare} for obj in items]
        of = {"kind": f"{request.kind.kind}List", "apiVersion": request.kind.api_version}
        return of | {"metadata": {"resourceVersion": str(self.version)}, "items": items}

    def do_watch(self, request: Request) -> Iterator[dict]:
        version = int(request.query["resourceVersion"])
        seconds = float(request.query["timeoutSeconds"])
        return self.follow(request, version, self.epoch, seconds)

    def follow(self, request: Request, version: int, epoch: int, seconds: float) -> Iterator[dict]:
        """The events after a version, until the requested timeout or the end of the epoch."""
        deadline = time.monotonic() + seconds
        bookmark_at = math.inf
        if "allowWatchBookmarks" in request.query:
            bookmark_at = time.monotonic() + self.bookmark_seconds
        while time.monotonic() < deadline and self.epoch == epoch:
            with self.changed:
                if self.version <= version and self.epoch == epoch:
                    self.changed.wait(min(deadline, bookmark_at) - time.monotonic())
                events = self.events(request, version)
                version = max(version, self.version)
                if time.monotonic() >= bookmark_at and version == self.version:
                    bookmark_at = time.monotonic() + self.bookmark_seconds
                    events.append(("BOOKMARK", {"metadata": {"resourceVersion": str(version)}}))
            for name, obj in events:
                yield {"type": name, "object": obj}

    def events(self, request: Request, since: int) -> list[tuple[str, dict]]:
        """Changes as a selector sees them: an object that no longer matches is deleted."""
        found = []
        log = self.log[request.resource]
        for change in log[bisect.bisect_right(log, since, key=lambda change: change.version) :]:
            was = self.concerns(request, change.old)
            if self.concerns(request, change.obj):
                found.append(("MODIFIED" if was else "ADDED", change.obj))
            elif was:
                meta = change.old["metadata"] | {"resourceVersion": str(change.version)}
                found.append(("DELETED", change.old | {"metadata": meta}))
        return found

    # -- writes

    def do_create(self, request: Request, obj: dict) -> dict:
        kind = request.kind
        if kind.plural in REVIEWS:
            return obj | {"status": self.review(obj["spec"])}
        meta = obj["metadata"]
        if "generateName" in meta:
            meta.setdefault("name", meta["generateName"] + uuid.uuid4().hex[:5])
        request.name = meta["name"]
        if (request.namespace, request.name) in self.objects[kind.plural]:
            raise Refusal(409, f"{kind.called(request.name)} already exists")
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        if kind.namespaced:
            meta["namespace"] = request.namespace
        meta["generation"] = 1
        obj.pop("status", None)
        if kind.plural == "pods":
            obj["status"] = {"phase": "Pending"}
        return self.save(request, self.admit(request, obj, None), None)

    def do_update(self, request: Request, obj: dict) -> dict:
        """Replaces an object of a known version; without a version, creates a Lease."""
        version = obj["metadata"].get("resourceVersion")
        is_there = (request.namespace, request.name) in self.objects[request.resource]
        if is_there and not version:
            raise Refusal(422, "metadata.resourceVersion must be specified for an update")
        if is_there or request.resource != "leases":
            return self.replace(request, self.find(request), obj)
        request.status = 201
        return self.do_create(request, obj)

    def do_patch(self, request: Request, patch: dict) -> dict:
        old = self.find(request)
        return self.replace(request, old, merge(old, patch))

    def replace(self, request: Request, old: dict, new: dict) -> dict:
        """Replaces the old state with the new one, as far as the request may change it."""
        before = old["metadata"]
        given = new.get("metadata", {})
        if given.get("resourceVersion", before["resourceVersion"]) != before["resourceVersion"]:
            raise Refusal(409, f"{request.kind.called(request.name)} has been modified")
        if request.subresource:
            new = old | {"status": new.get("status", {})}
        else:
            new = new | {"metadata": given | {name: before[name] for name in FIXED}}
            if "status" in old:
                new["status"] = old["status"]
        new = self.admit(request, copy(new), old)
        if new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] += 1
        return self.save(request, new, old)

    def admit(self, request: Request, obj: dict, old: dict | None) -> dict:
        """The object to store: changed by webhooks, with defaults, validated."""
        kind = request.kind
        if self.webhook:
            obj = self.webhook(request, obj)
        obj = {"apiVersion": kind.api_version, "kind": kind.kind} | obj
        if kind.schema:
            causes: list[str] = []
            obj = check(kind.schema, obj, "", causes)
            if causes:
                raise Refusal(422, f"{kind.called(request.name)} is invalid: {'; '.join(causes)}")
        if kind.plural == "daemonsets":
            default_daemonset(obj)
            count_template(obj, old)
        return obj

    def save(self, request: Request, obj: dict, old: dict | None) -> dict:
        """Stores what a request has made of an object, with its writer, unless it is a dry run."""
        if obj == old or "dryRun" in request.query:
            return obj
        known = old["metadata"]["managedFields"] if old else []
        writer = {"manager": request.manager, "subresource": request.subresource}
        others = [entry for entry in known if not writer.items() <= entry.items()]
        writers = {"managedFields": [*others, writer | {"time": now()}]}
        return self.store(obj | {"metadata": obj["metadata"] | writers}, old)

    def store(self, obj: dict, old: dict | None, is_deleted: bool = False) -> dict:
        """Stores an object under the next version, or deletes it, and wakes the watches."""
        plural = self.kind_of(obj).plural
        self.version += 1
        obj = obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self.version)}}
        self.objects[plural][sked.key_of(obj)] = obj
        if is_deleted:
            del self.objects[plural][sked.key_of(obj)]
        self.log[plural].append(Change(self.version, None if is_deleted else obj, old))
        self.changed.notify_all()
        return obj

    # -- deletion

    def do_delete(self, request: Request, options: dict) -> dict:
        obj = self.find(request)
        self.remove(obj, options.get("propagationPolicy") == "Foreground")
        return obj

    def drop(self, obj: dict) -> None:
        self.store(obj, obj, is_deleted=True)

    def remove(self, obj: dict, in_foreground: bool = False) -> None:
        """Deletes an object, or marks it if it waits for what it owns, or for a kubelet."""
        meta = obj["metadata"]
        if not in_foreground and obj["kind"] != "Pod":
            self.drop(obj)
        elif "deletionTimestamp" not in meta:
            mark = {"deletionTimestamp": now(), "finalizers": [FOREGROUND] * in_foreground}
            self.store(obj | {"metadata": meta | mark}, obj)

    def collect_garbage(self) -> None:
        """Deletes what has lost its owners."""
        stored = [obj for objs in self.objects.values() for obj in objs.values()]
        metas = [obj["metadata"] for obj in stored]
        leaving = {meta["uid"] for meta in metas if FOREGROUND in meta.get("finalizers", ())}
        staying = {meta["uid"] for meta in metas} - leaving
        owned = [{ref["uid"] for ref in meta.get("ownerReferences", ())} for meta in metas]
        for obj, owners in zip(stored, owned, strict=True):
            uid = obj["metadata"]["uid"]
            if uid in leaving and not any(uid in others for others in owned):
                self.drop(obj)
            elif owners and not owners & staying:
                self.remove(obj)


SKED = {"kind": "ServiceAccount", "namespace": "sked-system", "name": "sked-controller-manager"}


def write_kubeconfig(path: Path, current: str | None, clusters: dict, credentials: dict) -> Path:
    """Writes a kubeconfig with a context for each cluster."""
    kubeconfig = {
        "current-context": current,
        "clusters": [{"name": name, "cluster": clusters[name]} for name in clusters],
        "users": [{"name": name, "user": credentials} for name in clusters],
        "contexts": [{"name": n, "context": {"cluster": n, "user": n}} for n in clusters],
    }
    path.write_text(yaml.safe_dump(kubeconfig))
    return path


# ---------------------------------------------------------------- HTTP and TLS


class HttpServer(http.server.ThreadingHTTPServer):
    """Listens for an ApiServer."""

    request_queue_size = 1024  # many clients may reconnect at once

    def __init__(self, api: ApiServer) -> None:
        self.api = api
        super().__init__(("127.0.0.1", api.port), HttpHandler)

    def handle_error(self, *about: Any) -> None:
        """Reports bugs only, not clients that hang up or do not trust us."""
        if not isinstance(sys.exc_info()[1], OSError):
            self.api.report_bug("a connection")


class HttpHandler(http.server.BaseHTTPRequestHandler):
    """HTTP for an ApiServer; faults happen here."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Runs in the connection's own thread, so no handshake delays another."""
        self.api = self.server.api
        if self.api.tls:
            self.request = self.api.tls.wrap_socket(self.request, server_side=True)
        self.api.connections.add(self.request)
        super().setup()

    def finish(self) -> None:
        self.api.connections.discard(self.request)
        super().finish()
        self.request.close()

    def respond(self) -> None:
        """Does what is asked and answers, unless a fault interferes."""
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # the client was killed
            self.close_connection = True
            return
        fault = self.api.next_fault(self.command, self.path)
        self.api.thawed.wait()
        try:
            status, content = self.obey(body, fault)
        except Refusal as refusal:
            status, content = refusal.code, refusal.status
        if fault.action == "hang":
            fault.over.wait()
        if fault.action in ("hang", "lose"):
            self.close_connection = True
        else:
            events = content if isinstance(content, Iterator) else iter([content])
            self.answer(status, events, fault)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = respond

    def obey(self, body: bytes, fault: Fault) -> tuple[int, Any]:
        """The answer's status and content, unless it is a refusal."""
        token = self.headers.get("Authorization", "").partition(" ")[2]
        certificate = self.request.getpeercert() if self.api.tls else None
        user = self.api.authenticate(token, certificate)
        request = self.api.parse(self.command, self.path, user, self.headers["User-Agent"])
        if fault.action in ("hang", "error", "garbage"):  # it does nothing
            self.api.requests.append(request)
            request.status = fault.status if fault.action == "error" else 0
            if fault.action == "garbage":
                return 200, "<html>this is not JSON</html>"
            raise Refusal(fault.status, "a fault")
        if self.command == "PATCH" and "merge-patch+json" not in self.headers["Content-Type"]:
            raise Refusal(415, "this stand-in for an API server takes JSON merge patches only")
        content = self.api.serve(request, json.loads(body or "{}"))
        return request.status, content

    def answer(self, status: int, events: Iterator[Any], fault: Fault) -> None:
        """Sends an object or the events of a watch, each as a line in its own chunk."""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            self.api.thawed.wait()
            text = event if isinstance(event, str) else json.dumps(event)
            line = text.encode() + b"\n"
            self.send(b"%x\r\n%s\r\n" % (len(line), line), fault)
        self.send(b"0\r\n\r\n", fault)

    def send(self, data: bytes, fault: Fault) -> None:
        """Sends the data, or half of it if a fault cuts it short."""
        if fault.action not in ("truncate", "stall"):
            self.wfile.write(data)
            return
        self.wfile.write(data[: len(data) // 2])
        if fault.action == "stall":
            fault.over.wait()
        raise ConnectionAbortedError("a fault")

    def log_message(self, *_: object) -> None:
        pass


NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


def openssl(folder: Path, command: str) -> None:
    subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


@functools.cache
def authority() -> Path:
    """The folder of a CA and of everything it signs."""
    folder = Path(tempfile.mkdtemp(prefix="sked-"))
    atexit.register(shutil.rmtree, folder)
    openssl(folder, f"req -x509 -subj /CN=tests {NEW_KEY} -keyout ca.key -out ca.crt")
    return folder


@functools.cache
def sign(name: str, usage: str = "keyUsage=digitalSignature") -> tuple[Path, Path]:
    """A new certificate and its key; without Authority Key Identifier, as on some clusters."""
    folder = authority()
    no_ids = "-addext subjectKeyIdentifier=none -addext authorityKeyIdentifier=none"
    extensions = f"-addext basicConstraints=CA:false {no_ids} -addext {usage}"
    ca = f"-CA ca.crt -CAkey ca.key {extensions}"
    openssl(folder, f"req -x509 -subj /CN={name} {NEW_KEY} {ca} -keyout {name}.key -out {name}.crt")
    return folder / f"{name}.crt", folder / f"{name}.key"


def serving_tls() -> ssl.SSLContext:
    """TLS for an ApiServer; client certificates are optional."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*sign("kube-apiserver", "subjectAltName=IP:127.0.0.1"))
    context.load_verify_locations(authority() / "ca.crt")
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


# ---------------------------------------------------------------- nodes

TERMS = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"


def holds(requirement: dict, labels: dict) -> bool:
    """Whether a node's labels meet one requirement of an affinity."""
    is_listed = labels.get(requirement["key"]) in requirement["values"]
    return is_listed == (requirement["operator"] == "In")


def fits(pod: dict, node: dict) -> bool:
    """Whether a pod's nodeSelector and affinity let it run on a node."""
    labels = node["metadata"].get("labels", {})
    if not pod.get("nodeSelector", {}).items() <= labels.items():
        return False
    terms = [term.get("matchExpressions", []) for term in dig(pod, TERMS) or [{}]]
    return any(all(holds(requirement, labels) for requirement in term) for term in terms)


def node_of(pod: dict) -> str:
    return pod["spec"]["nodeName"]


def ready_seconds(pod: dict) -> float:
    """How long a pod has been ready: less than 0 if it is not, or is being deleted."""
    ready = condition_of(pod, "Ready")
    if ready.get("status") != "True" or "deletionTimestamp" in pod["metadata"]:
        return -1.0
    return seconds_ago(ready["lastTransitionTime"])


class Kubelets:
    """Plays the DaemonSet controller and the kubelets on an ApiServer.

    A pod runs and is ready, with these exceptions. An image with the tag nopull cannot be pulled.
    One with the tag crash crash-loops. One with the tag idle runs but attaches nothing, which only
    a probe notices.
    """

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.stop_seconds = 0.05
        self.crash_seconds = (2.0, 4.0, 1.0)  # up, dead, waiting; and again
        self.first_seen = {}  # time, by uid and event
        self.steps = {}  # the current step of each pod, by uid
        server.keep_doing(self.play)

    def add_node(self, name: str, **labels: str) -> None:
        labels |= {"kubernetes.io/hostname": name}
        self.server.create({"kind": "Node", "metadata": {"name": name, "labels": labels}})

    def pods(self, daemonset: str, namespace: str = "default") -> dict[str, dict]:
        """The pods of a DaemonSet, by node."""
        pods = self.server.list("pods", namespace)
        mine = [pod for pod in pods if dig(pod, "metadata.labels.name") == daemonset]
        return {node_of(pod): pod | {"kind": "Pod"} for pod in mine}

    def play(self) -> None:
        """Looks at everything, so it needs no notifications and misses nothing."""
        for pod in list(self.server.objects["pods"].values()):
            self.live(pod)
        for daemonset in list(self.server.objects["daemonsets"].values()):
            if "deletionTimestamp" not in daemonset["metadata"]:
                self.sync(daemonset)

    def report(self, obj: dict, status: dict) -> None:
        if merge(obj.get("status"), status) != obj.get("status"):
            plural = self.server.kind_of(obj).plural
            self.server.patch(plural, *sked.key_of(obj), {"status": status}, "status")

    # -- the DaemonSet controller

    def sync(self, daemonset: dict) -> None:
        uid = daemonset["metadata"]["uid"]
        pods = {
            node_of(pod): pod
            for pod in self.server.objects["pods"].values()
            if pod["metadata"]["ownerReferences"][0]["uid"] == uid
        }
        spec = daemonset["spec"]
        # a hash of the content, so a rollback has the revision of the earlier template
        content = json.dumps(spec["template"], sort_keys=True)
        revision = hashlib.sha1(content.encode()).hexdigest()[:10]
        nodes = self.server.objects["nodes"].values()
        wanted = {n["metadata"]["name"] for n in nodes if fits(spec["template"]["spec"], n)}
        mine = wanted & pods.keys()
        label = "metadata.labels.controller-revision-hash"
        old = {node for node, pod in pods.items() if dig(pod, label) != revision}
        enough = spec.get("minReadySeconds", 0)
        available = {node for node, pod in pods.items() if ready_seconds(pod) >= enough}
        doomed = pods.keys() - wanted
        if spec["updateStrategy"]["type"] == "RollingUpdate":
            most = spec["updateStrategy"]["rollingUpdate"]["maxUnavailable"]
            spare = max(0, most - len(wanted - available))
            doomed |= (old - available) | set(sorted(old & available)[:spare])
        for node in doomed:
            self.server.remove(pods[node])
        for node in sorted(wanted - pods.keys()):
            self.make_pod(daemonset, node, revision)
        status = {
            "observedGeneration": daemonset["metadata"]["generation"],
            "desiredNumberScheduled": len(wanted),
            "currentNumberScheduled": len(mine),
            "numberMisscheduled": len(pods) - len(mine),
            "numberReady": sum(ready_seconds(pods[node]) >= 0 for node in mine),
            "updatedNumberScheduled": len(mine - old) or None,
        }
        self.report(daemonset, status)

    def make_pod(self, daemonset: dict, node: str, revision: str) -> None:
        meta = daemonset["metadata"]
        template = daemonset["spec"]["template"]
        owner = {"kind": "DaemonSet", "name": meta["name"], "uid": meta["uid"], "controller": True}
        labels = {
            **template["metadata"]["labels"],
            "controller-revision-hash": revision,
            "pod-template-generation": meta["annotations"][TEMPLATE_GENERATION],
        }
        pod_meta = {"generateName": f"{meta['name']}-", "namespace": meta["namespace"]}
        pod_meta |= {"labels": labels, "ownerReferences": [owner]}
        pod = {"kind": "Pod", "metadata": pod_meta, "spec": template["spec"] | {"nodeName": node}}
        with contextlib.suppress(Refusal):  # by a webhook, for now
            self.server.create(pod)

    # -- the kubelets

    def since(self, pod: dict, what: str) -> float:
        """Seconds since this was first seen for a pod."""
        first = self.first_seen.setdefault((pod["metadata"]["uid"], what), time.monotonic())
        return time.monotonic() - first

    def live(self, pod: dict) -> None:
        """Takes the next step in the life of a pod when it is due."""
        uid = pod["metadata"]["uid"]
        if "deletionTimestamp" in pod["metadata"]:
            if self.since(pod, "end") >= self.stop_seconds:
                self.server.drop(pod)
        else:
            step = self.step(pod, self.since(pod, "birth"))
            if self.steps.get(uid) != step:
                self.steps[uid] = step
                containers = [container_status(pod, c, *step) for c in pod["spec"]["containers"]]
                is_ready = all(container["ready"] for container in containers)
                ready = {"type": "Ready", "status": str(is_ready), "lastTransitionTime": now()}
                self.report(pod, {"conditions": [ready], "containerStatuses": containers})

    def step(self, pod: dict, seconds: float) -> tuple[str, int]:
        """What a pod does after this many seconds, and how often its container has restarted."""
        if tag_of(pod) not in FINAL_MESSAGES:
            return "nopull" if tag_of(pod) == "nopull" else "attached", 0
        up, dead, waiting = self.crash_seconds
        count, seconds = divmod(seconds, up + dead + waiting)
        if seconds < up:
            return "up", int(count)
        return "dead" if seconds < up + dead else "waiting", int(count)


FINAL_MESSAGES = {  # of a container that fails, by the tag of the image
    "crash": "Failed to load BPF program",
    "idle": "no scheduler is attached: /sys/kernel/sched_ext/state is 'disabled'",
}


def tag_of(pod: dict) -> str:
    return pod["spec"]["containers"][0]["image"].rpartition(":")[2]


def container_status(pod: dict, container: dict, step: str, restarts: int) -> dict:
    """What a kubelet reports; the step is that of the container that fails, if one does."""
    name, image = container["name"], container["image"]
    is_culprit = name == ("probe" if tag_of(pod) == "idle" else "scx")
    died = {"exitCode": 1, "reason": "Error", "startedAt": now(2), "finishedAt": now()}
    if name == "probe" or container["terminationMessagePolicy"] == "FallbackToLogsOnError":
        died["message"] = FINAL_MESSAGES.get(tag_of(pod), "")
    states = {
        "nopull": {"waiting": {"reason": "ImagePullBackOff", "message": f"{image}: not found"}},
        "dead": {"terminated": died},
        "waiting": {"waiting": {"reason": "CrashLoopBackOff"}},
    }
    state = states.get(step if is_culprit else "up", {"running": {"startedAt": now()}})
    last = is_culprit and (restarts or step == "waiting")
    # a probe becomes ready when it finds a scheduler attached
    found = step == "attached" or name != "probe"
    return {
        "name": name,
        "restartCount": restarts if is_culprit else 0,
        "ready": "running" in state and found,
        "state": state,
        "lastState": {"terminated": died} if last else {},
    }


# ---------------------------------------------------------------- the cluster and the operator


class RealCluster(Client):
    """The cluster that $SKED_TEST_KUBECONFIG names, with install.yaml applied: as admin."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = os.environ["SKED_TEST_KUBECONFIG"]
        self.api = connect(self.config)
        self.resources = BUILT_IN | {"schedexts": schedexts()}
        self.namespaces = []
        for obj in installed():
            try:
                self.create(obj)
            except Refusal:  # it is there
                self.patch(self.kind_of(obj).plural, *sked.key_of(obj), obj)
        crd = ("customresourcedefinitions", "", "schedexts.sked.schedkit.io")
        eventually(lambda: condition_of(self.get(*crd), "Established").get("status"), "True")

    def call(self, method: str, path: str, body: Any = None) -> Any:
        path, _, query = path.partition("?")
        try:
            return self.api.request(method, path, body, **dict(urllib.parse.parse_qsl(query)))
        except sked.ApiError as error:
            raise Refusal(error.status, str(error)) from None

    def namespace(self) -> str:
        """A new namespace, deleted after all tests."""
        self.namespaces.append(f"sked-test-{uuid.uuid4().hex[:8]}")
        labels = {"pod-security.kubernetes.io/enforce": "privileged"}
        meta = {"name": self.namespaces[-1], "labels": labels}
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
        return self.namespaces[-1]

    def kubeconfig(self) -> Path:
        """A kubeconfig with the permissions of the operator's service account."""
        account = ("sked-system", "sked-controller-manager", "token")
        token = self.call("POST", BUILT_IN["serviceaccounts"].path(*account), {"spec": {}})
        kubeconfig = yaml.safe_load(Path(self.config).read_text())
        for user in kubeconfig["users"]:
            user["user"] = {"token": token["status"]["token"]}
        path = self.folder / "sked.kubeconfig"
        path.write_text(yaml.safe_dump(kubeconfig))
        return path


def connect(kubeconfig: Path | str | None) -> sked.Api:
    path = str(kubeconfig) if kubeconfig else None
    return sked.Api(functools.partial(sked.load_configuration, path, None))


class OperatorProcess:
    """sked.py in a process of its own; a hasty one has shorter times."""

    def __init__(self, kubeconfig: Path, flags: Iterable[str], is_hasty: bool) -> None:
        self.port = free_port()  # of its health endpoint
        self.log = kubeconfig.with_name(f"{uuid.uuid4()}.log")
        command = [sys.executable, *(("-c", HASTY) if is_hasty else ("sked.py",)), *flags]
        command += [f"--kubeconfig={kubeconfig}"]
        command += [f"--health-probe-bind-address=127.0.0.1:{self.port}"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=HERE, stdout=log, stderr=log)

    @property
    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text()

    def stop(self, sent: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit code."""
        self.process.send_signal(sent)
        return self.process.wait(20)  # less than the timeout of a hanging request


# ---------------------------------------------------------------- fixtures


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        server.set_default("minReadySeconds", 0)  # tests do not wait for ten seconds
        yield server
        assert server.bugs == set(), "see the log of the stand-in"


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    if "SKED_TEST_KUBECONFIG" not in os.environ:
        pytest.skip("only a real cluster shows this: set $SKED_TEST_KUBECONFIG")
    cluster = RealCluster(tmp_path_factory.mktemp("real"))
    yield cluster
    for name in cluster.namespaces:
        cluster.delete("namespaces", "", name)


@pytest.fixture
def kubelets(server: ApiServer) -> Kubelets:
    return Kubelets(server)


@pytest.fixture
def fleet(world: World, kubelets: Kubelets) -> Kubelets:
    """The nodes a, b and c, each in the pool of that name; x runs on all of them."""
    for node in "abc":
        kubelets.add_node(node, pool=node)
    world.deploy("AllReady")
    return kubelets


HURRY = {
    "backoff": lambda failures, most: min(most, 0.05 * failures),
    "GATHER_SECONDS": 0.05,
    "SETTLE_SECONDS": 0.25,
    "BLOCKED_SECONDS": 0.5,
    "QUIET_SECONDS": 0.5,
    "EVENT_SECONDS": 0.5,
}


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Shortens sked's waits and resets its metrics."""
    for name, value in HURRY.items():
        patch.setattr(sked, name, value)
    patch.setattr(sked, "METRICS", sked.Metrics())


HASTE = {
    "REQUEST_SECONDS": 0.3,
    "BEAT_SECONDS": 0.3,
    "WATCH_SECONDS": 1,
    "LEASE_SECONDS": 8,
    "RENEW_SECONDS": 0.3,
    "RENEW_REQUEST_SECONDS": 0.6,
    "RENEW_DEADLINE_SECONDS": 5.0,
}
HASTY = f"import sked, sys; vars(sked).update({HASTE}); sys.exit(sked.main())"


@pytest.fixture
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the times of sked's requests, watches and lease."""
    for name, seconds in HASTE.items():
        monkeypatch.setattr(sked, name, seconds)


@pytest.fixture
def launch(server: ApiServer) -> Iterator[Callable[..., OperatorProcess]]:
    """Starts an OperatorProcess with these flags, as this user of the server."""
    started = []

    def start(*flags: str, user: str = "sked", is_hasty: bool = False) -> OperatorProcess:
        started.append(OperatorProcess(server.kubeconfig(user), flags, is_hasty))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        print(one.said)  # pytest shows it if the test fails


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home directory with kubeconfigs; each context has the name of its host."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".kube").mkdir()
    hosts = {".kube/config": ["h1"], "flag": ["f1", "f2"], "env": ["e1"], "other": []}
    for name, those in hosts.items():
        clusters = {host: {"server": f"http://{host}"} for host in those}
        write_kubeconfig(tmp_path / name, those[0] if those else "e1", clusters, {})
    write_kubeconfig(tmp_path / "silent", None, {"s1": {"server": "http://s1"}}, {})
    (tmp_path / "text").write_text("just text")
    (tmp_path / "broken").write_text("a: [")
    return tmp_path


@pytest.fixture
def in_pod(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pod's environment; the folder holds the service account's token."""
    (home / "token").write_text("first")
    where = "kubernetes.config.incluster_config"
    monkeypatch.setattr(f"{where}.SERVICE_TOKEN_FILENAME", str(home / "token"))
    monkeypatch.setattr(f"{where}.SERVICE_CERT_FILENAME", str(authority() / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    return home


# ---------------------------------------------------------------- objects and queries


def schedext(name: str, sched: str = RUSTY, namespace: str = "default", **spec: Any) -> dict:
    return {
        "apiVersion": "sked.schedkit.io/v1",
        "kind": "SchedExt",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"sched": sched, **spec},
    }


SCHEDULER = {"name": "scx", "image": RUSTY, "securityContext": {"privileged": True}}


def daemonset(name: str, namespace: str, owner_uid: str = "") -> dict:
    """The DaemonSet that the Go operator makes of a SchedExt, as a literal."""
    meta: dict = {"name": name, "namespace": namespace, "labels": {"managed-by": "sked-controller"}}
    if owner_uid:
        owner = {"apiVersion": "sked.schedkit.io/v1", "kind": "SchedExt", "name": name}
        owner |= {"uid": owner_uid, "controller": True, "blockOwnerDeletion": True}
        meta["ownerReferences"] = [owner]
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": meta,
        "spec": {
            "selector": {"matchLabels": {"name": name}},
            "template": {
                "metadata": {"labels": {"name": name, "managed-by": "sked-controller"}},
                "spec": {"containers": [SCHEDULER]},
            },
        },
    }


def unlabelled_daemonset(*args: str) -> dict:
    return merge(daemonset(*args), {"metadata": {"labels": None}})


def ready_on(total: int) -> dict:
    """status.nodes of a SchedExt that is ready on this many nodes."""
    return {"desired": total, "ready": total, "updated": total, "failing": 0}


def images(server: ApiServer) -> dict[str, str]:
    """The image of each DaemonSet that a SchedExt controls."""
    return {
        obj["metadata"]["name"]: obj["spec"]["template"]["spec"]["containers"][0]["image"]
        for obj in server.list("daemonsets")
        if dig(obj, "metadata.ownerReferences.0.kind") == "SchedExt"
    }


def free_port() -> int:
    """A port that no outgoing connection can take, because those use higher ones."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")


def ask(port: int, path: str, token: str = "", tls: bool = False) -> tuple[int, str]:
    """The answer's status and body."""
    url = f"{'https' if tls else 'http'}://127.0.0.1:{port}{path}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib3.PoolManager(cert_reqs="CERT_NONE", retries=False, timeout=60) as pool:
        response = pool.request("GET", url, headers=headers)
        return response.status, response.data.decode()


# ---------------------------------------------------------------- shared by the tests


def cases(names: str, text: str, **defaults: Any) -> pytest.MarkDecorator:
    """Parametrizes a test by a YAML table: a row for each case, as a list or by names."""
    params = []
    for case, row in yaml.safe_load(text).items():
        if not isinstance(row, list):
            fields = defaults | row
            row = [fields.pop(name) for name in names.split(", ")]
            assert not fields, "a row has a parameter that the test does not have"
        params.append(pytest.param(*row, id=case))
    return pytest.mark.parametrize(names, params)


def given(**spec: Any) -> dict:
    """A SchedExt as the API server returns it."""
    meta = {"uid": "u-1", "generation": 1}
    return merge(schedext("scx-rusty", namespace="tools", **spec), {"metadata": meta, "status": {}})


PLAIN = daemonset("scx-rusty", "tools", "u-1")  # of given()


def passes() -> float:
    """How often sked has reconciled."""
    samples = sked.METRICS.copy().items()
    return sum(count for name, count in samples if "reconcile_total" in name)


class World:
    """SchedExts and a sked that reconciles them. The default name is x."""

    def __init__(self, api: ApiServer | RealCluster, patch: pytest.MonkeyPatch) -> None:
        self.api = api
        self.ns = api.namespace()
        self.kubeconfig = api.kubeconfig()
        self.set = functools.partial(patch.setattr, sked)
        self.operator = None

    def begin(self) -> None:
        """Starts sked in this process, with the permissions of its service account."""
        self.operator = sked.Operator(connect(self.kubeconfig))
        threading.Thread(target=self.operator.run, daemon=True).start()

    def start(self) -> None:
        """Starts sked and waits until its caches are filled."""
        self.begin()
        eventually(self.operator.is_ready)

    def serve(self, *flags: str) -> tuple[int, int]:
        """Starts sked's HTTP servers; returns the ports of health and metrics."""
        ports = free_port(), free_port()
        kinds = zip(("health-probe", "metrics"), ports, strict=True)
        argv = [f"--{kind}-bind-address=127.0.0.1:{port}" for kind, port in kinds]
        sked.serve(sked.parse(argv + list(flags)), self.operator)
        return ports

    def deploy(self, reason: str = "RollingOut", **spec: Any) -> dict:
        """Starts sked, adds x and waits until its status gives this reason."""
        self.start()
        self.add(**spec)
        return self.expect(reason)

    def stop(self) -> None:
        if self.operator:
            self.operator.stop.set()
        workers = {f"worker-{n}" for n in range(sked.WORKERS)}
        eventually(lambda: workers & {thread.name for thread in threading.enumerate()}, nothing)

    def restart(self) -> list[str]:
        """Restarts sked; returns what it writes until it has reconciled every SchedExt."""
        eventually(lambda: self.written(time.time() - 0.5), nothing)
        self.stop()
        since = time.time()
        self.set("METRICS", sked.Metrics())
        self.start()
        total = len(self.api.list("schedexts"))
        eventually(passes, at_least(total))
        return self.written(since)

    def is_idle(self) -> bool:
        """Whether sked's caches are up to date and it has nothing to do."""
        operator = self.operator
        heard = operator.schedexts.values() + operator.daemonsets.values()
        there = self.api.list("schedexts") + self.api.list("daemonsets")
        versions = [{obj["metadata"]["resourceVersion"] for obj in objs} for objs in (heard, there)]
        return versions[0] == versions[1] and not operator.queue.due and not operator.queue.busy

    def is_stamped(self) -> bool:
        """Whether sked is done with its last write of the DaemonSet of x."""
        obj = self.made()
        return stamp_on(obj)["generation"] == obj["metadata"]["generation"]

    def written(self, since: float = 0.0) -> list[str]:
        return [request.deed for request in self.api.writes(since) if request.status < 300]

    def add(self, name: str = "x", sched: str = RUSTY, **spec: Any) -> str:
        """Creates a SchedExt and returns its uid."""
        return self.api.create(schedext(name, sched, self.ns, **spec))["metadata"]["uid"]

    def edit(self, name: str = "x", **spec: Any) -> None:
        self.api.patch("schedexts", self.ns, name, {"spec": spec})

    def remove(self, name: str = "x") -> None:
        self.api.delete("schedexts", self.ns, name)

    def get(self, name: str = "x") -> dict:
        return self.api.get("schedexts", self.ns, name)

    def drift(self, patch: dict) -> None:
        self.api.patch("daemonsets", self.ns, "x", patch)

    def made(self, name: str = "x") -> dict | None:
        return self.api.get("daemonsets", self.ns, name)

    def image(self) -> str | None:
        return dig(self.made(), "spec.template.spec.containers.0.image")

    def expect(self, reason: str, name: str = "x") -> dict:
        """Waits for this reason in the status of the current spec; returns the Ready condition."""

        def is_reached(obj: dict) -> bool:
            ready = condition_of(obj, "Ready")
            is_current = ready.get("observedGeneration") == obj["metadata"]["generation"]
            return is_current and ready["reason"] == reason

        return condition_of(eventually(lambda: self.get(name), is_reached), "Ready")

    def nodes(self) -> dict:
        return dig(self.get(), "status.nodes") or {}

    def conditions(self) -> list[dict]:
        """Every Ready condition that x has had, in order."""
        objs = [change.obj for change in list(self.api.log["schedexts"]) if change.obj]
        conditions = [condition_of(obj, "Ready") for obj in objs if sked.key_of(obj)[1] == "x"]
        return list(filter(None, conditions))

    def reasons(self) -> list[str]:
        return [reason for reason, _ in itertools.groupby(c["reason"] for c in self.conditions())]


@pytest.fixture
def world(request: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> Iterator[World]:
    hurry(monkeypatch)
    world = World(request.getfixturevalue(getattr(request, "param", "server")), monkeypatch)
    yield world
    world.stop()
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []


A = {"pool": "a"}
B = {"pool": "b"}
STAMP_ANNOTATION = "sked.schedkit.io/applied"
NOWHERE = {"sked.schedkit.io/suspended": "true"}


def in_template(**pod: Any) -> dict:
    return {"spec": {"template": {"spec": pod}}}


def running(kubelets: Kubelets) -> dict[str, str]:
    """The image of each pod of x, by node."""
    pods = kubelets.pods("x").items()
    return {node: pod["spec"]["containers"][0]["image"] for node, pod in pods}


def uids(kubelets: Kubelets) -> dict[str, str]:
    return {node: pod["metadata"]["uid"] for node, pod in kubelets.pods("x").items()}


# ---------------------------------------------------------------- build_daemonset

# The fields that are passed on as they are, by where they go.
FIELDS = yaml.safe_load("""
daemonset:
  updateStrategy: {rollingUpdate: {maxUnavailable: 25%}}
  minReadySeconds: 35
pod:
  nodeSelector: {pool: latency, node-role.kubernetes.io/worker: ""}
  tolerations: [{key: a, effect: NoExecute, tolerationSeconds: 60}]
  priorityClassName: system-node-critical
  imagePullSecrets: [{name: regcred}]
  hostPID: true
container:
  imagePullPolicy: Never
  args: [--slice-us, "5000", ""]
  env:
  - {name: EMPTY, value: ""}
  - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
  - {name: CPU, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}
  resources: {requests: {cpu: "0.5", memory: 1e3}, limits: {cpu: 1, memory: 1Gi}}
  terminationMessagePolicy: FallbackToLogsOnError
""")
PASSED_ON = {field: value for fields in FIELDS.values() for field, value in fields.items()}
PATHS = ["/sys/kernel/debug", "/run/x"]
ALL_FIELDS = PASSED_ON | {"suspend": True, "hostPaths": PATHS, "probeImage": "busybox:stable"}


def pod_spec(built: dict) -> dict:
    return built["spec"]["template"]["spec"]


def test_a_plain_schedext_makes_exactly_the_go_operators_daemonset():
    assert sked.build_daemonset(given()) == PLAIN


def test_the_optional_fields_are_passed_on_and_set_nothing_else():
    expected = copy(PLAIN)
    expected["spec"] |= FIELDS["daemonset"]
    pod_spec(expected).update(FIELDS["pod"])
    pod_spec(expected)["containers"][0] |= FIELDS["container"]
    assert sked.build_daemonset(given(**PASSED_ON)) == expected


def test_suspend_adds_a_label_to_the_node_selector_that_no_node_has():
    built = sked.build_daemonset(given(suspend=True, nodeSelector=A))
    assert pod_spec(built)["nodeSelector"] == A | NOWHERE


def test_each_host_path_is_mounted_at_the_same_place():
    pod = pod_spec(sked.build_daemonset(given(hostPaths=PATHS)))
    volumes = {volume["name"]: volume["hostPath"] for volume in pod["volumes"]}
    mounts = pod["containers"][0]["volumeMounts"]
    assert [mount["mountPath"] for mount in mounts] == PATHS
    assert [volumes[mount["name"]] for mount in mounts] == [{"path": path} for path in PATHS]


def test_a_probe_image_adds_an_unprivileged_container_that_must_attach_within_30_seconds():
    built = sked.build_daemonset(given(probeImage="busybox:stable"))
    scx, probe = pod_spec(built)["containers"]
    assert (probe["name"], probe["image"]) == ("probe", "busybox:stable")
    assert probe["terminationMessagePolicy"] == "File"
    startup = probe["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 30
    unprivileged = """
        {runAsNonRoot: true, runAsUser: 65534, readOnlyRootFilesystem: true,
         allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
        """
    assert probe["securityContext"] == yaml.safe_load(unprivileged)
    pod_spec(built)["containers"] = [scx]
    assert built == PLAIN


@pytest.fixture(params=[sh for sh in ("sh", "busybox sh") if shutil.which(sh.split()[0])])
def probe(request: Any, tmp_path: Path) -> Iterator[subprocess.Popen]:
    """The probe's script in a real shell, with the files state and said in place of the kernel's.

    In place of each sleep it writes a line, and reads one.
    """
    script = sked.PROBE_CONTAINER["command"][2]
    script = script.replace("/sys/kernel/sched_ext/state", f"{tmp_path}/state")
    script = script.replace("/dev/termination-log", f"{tmp_path}/said")
    script = re.sub(r"sleep \d", "echo; head -n 1 <&3 >/dev/null", script)
    (tmp_path / "said").touch()
    command = [*request.param.split(), "-c", f"exec 3<&0; {script}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        process.stdout.readline()
        yield process
        process.kill()


def goes_on(probe: subprocess.Popen) -> bool:
    """Whether another sleep of the probe follows this one."""
    probe.stdin.write("\n")
    probe.stdin.flush()
    return bool(probe.stdout.readline())


@pytest.mark.parametrize("state, code", [("enabled", 0), ("disabled", 1), (None, 1)])
def test_sigterm_ends_the_probe_without_waiting_for_its_sleep(tmp_path, probe, state, code):
    if state:
        (tmp_path / "state").write_text(f"{state}\n")
        assert goes_on(probe)
    probe.terminate()
    assert probe.wait(60) == code
    words = f"no scheduler is attached: {tmp_path}/state is '{state or 'not there'}'\n"
    assert (tmp_path / "said").read_text() == (words if code else "")


def test_the_probe_waits_for_a_scheduler_and_fails_when_it_misses_it_four_times(tmp_path, probe):
    assert all(goes_on(probe) for _ in range(9))  # no state file yet
    for state, times in (("enabled", 9), ("disabled", 3), ("enabled", 1)):
        (tmp_path / "state").write_text(f"{state}\n")
        assert all(goes_on(probe) for _ in range(times))
    (tmp_path / "state").unlink()
    assert [goes_on(probe) for _ in range(4)] == [True, True, True, False]
    assert probe.wait(60) == 1
    assert (tmp_path / "said").read_text().endswith("is 'not there'\n")


def test_a_manifest_that_was_never_applied_has_no_owner_and_no_namespace():
    built = sked.build_daemonset({"metadata": {"name": "x"}, "spec": {"sched": RUSTY}})
    assert built["metadata"] == {"name": "x", "labels": {"managed-by": "sked-controller"}}


# ---------------------------------------------------------------- who runs on a node


def for_nodes(
    labels: str,
    name: str = "other",
    created: str = "",
    namespace: str = "tools",
    leaving: bool = False,
    **more: Any,
) -> dict:
    """A SchedExt for the nodes with these labels, in kubectl's form: a=1,b=2."""
    selector = dict(pair.split("=") for pair in labels.split(",") if pair)
    obj = given(nodeSelector=selector, **more)
    meta = obj["metadata"] | {"name": name, "namespace": namespace}
    if created:
        meta["creationTimestamp"] = f"2026-01-01T00:00:0{created}Z"
    if leaving:
        meta["deletionTimestamp"] = now()
    return obj | {"metadata": meta}


def terms(built: dict) -> list[str]:
    """The terms of a DaemonSet's affinity, in the short form a!=1|2 b!=3."""
    return [
        " ".join(
            f"{expression['key']}!={'|'.join(expression['values'])}"
            for expression in term["matchExpressions"]
        )
        for term in dig(pod_spec(built), TERMS) or []
    ]


@cases(
    "mine, others, expected",
    """
    disjoint: [a=1, ["a=2,b=1"], []]
    values of one key share a list: ["", [pool=b, pool=a, pool=a], [pool!=a|b]]
    each extra pair makes a term: ["", ["e=5,d=4,c=3,b=2,a=1"], [a!=1, b!=2, c!=3, d!=4, e!=5]]
    shared pairs are left out: [a=1, ["a=1,b=2"], [b!=2]]
    a pool within a pool adds nothing: ["", ["a=1,b=2", a=1], [a!=1]]
    one pair and two: ["", ["b=2,a=1", c=3], [a!=1 c!=3, b!=2 c!=3]]
    """,
)
def test_a_schedext_yields_to_longer_selectors_that_select_some_of_its_nodes(
    mine, others, expected
):
    winners = [for_nodes(other) for other in others]
    assert terms(sked.build_daemonset(for_nodes(mine, "x"), winners)) == expected


@cases(
    "mine, other, expected",
    """
    the other is older: {mine: {created: "2"}, other: {created: "1"}}
    as old, the other comes first by name: {other: {name: a}}
    the other was never applied: {mine: {created: "1"}, other: {name: a}, expected: false}
    the other is suspended: {mine: {created: "2"}, other: {created: "1", suspend: true}}
    itself as it was applied before: {other: {name: x, created: "1"}, expected: false}
    as old, the other is in a namespace that comes first: {other: {name: z, namespace: a}}
    """,
    mine={},
    expected=True,
)
def test_of_two_selectors_of_the_same_length_the_older_schedext_wins(mine, other, expected):
    mine = for_nodes("a=1", "x", **mine)
    built = sked.build_daemonset(mine, [for_nodes("b=1", **other)])
    assert terms(built) == (["b!=1"] if expected else [])
    built = sked.build_daemonset(mine, [for_nodes("a=1", **other)])
    assert pod_spec(built)["nodeSelector"] == {"a": "1"} | (NOWHERE if expected else {})
    assert "affinity" not in pod_spec(built)


@cases(
    "spec, others",
    """
    suspended: {spec: {suspend: true}, others: []}
    beside an older one for the same nodes: {spec: {}, others: [""]}
    """,
)
def test_what_runs_nowhere_needs_no_affinity_however_many_pools_there_are(spec, others):
    pools = [f"a{n}=1,b{n}=1" for n in range(7)]  # 128 terms
    built = sked.build_daemonset(for_nodes("", "x", **spec), map(for_nodes, pools + others))
    assert pod_spec(built)["nodeSelector"] == NOWHERE
    assert "affinity" not in pod_spec(built)


def test_each_node_runs_exactly_one_of_the_schedexts_that_select_it():
    """The longest selector, else the oldest SchedExt, whatever the labels of the node are."""
    selectors = ("", "a=1", "a=2", "b=1", "b=1", "a=1,b=1", "b=1,c=1", "a=1,b=1,c=1", "d=1,e=1")
    those = [
        for_nodes(labels, name, created)
        for labels, name, created in zip(selectors, "ihgfedcba", "123456789", strict=True)
    ]
    for values in itertools.product("123", repeat=5):
        labels = dict(zip("abcde", values, strict=True))
        node = {"metadata": {"labels": labels}, "spec": {}}
        matching = [obj for obj in those if fits(obj["spec"], node)]
        winner = max(
            matching, key=lambda obj: (len(obj["spec"]["nodeSelector"]), -those.index(obj))
        )
        placed = [obj for obj in those if fits(pod_spec(sked.build_daemonset(obj, those)), node)]
        assert placed == [winner]


def pairs(prefix: str, total: int) -> str:
    return ",".join(f"{prefix}{n}=1" for n in range(total))


@pytest.mark.parametrize(
    "winners, needed",
    [
        pytest.param([f"a={n // 12},b={n % 12}" for n in range(144)], 2, id="the same two labels"),
        pytest.param([pairs("a", 11), pairs("b", 11), "a0=1,b0=1"], 21, id="the shortest first"),
        pytest.param([pairs("a", 10), pairs("b", 10)], 100, id="a hundred terms"),
        pytest.param([pairs("a", 11), pairs("b", 10)], None, id="more are refused"),
    ],
)
def test_yielding_takes_at_most_a_hundred_terms(winners, needed):
    refused = pytest.raises(sked.InvalidSpec, match="too many")
    with contextlib.nullcontext() if needed else refused:
        built = sked.build_daemonset(for_nodes("", "x"), map(for_nodes, winners))
        assert len(terms(built)) == needed


# ---------------------------------------------------------------- pods

# A plain SchedExt's DaemonSet, as the API server stores it.
STORED = merge(
    PLAIN,
    yaml.safe_load("""
metadata:
  uid: d-1
  resourceVersion: "7"
  generation: 1
  creationTimestamp: "2026-01-01T00:00:00Z"
  annotations: {deprecated.daemonset.template.generation: "1"}
status:
  currentNumberScheduled: 2
  desiredNumberScheduled: 2
  numberMisscheduled: 0
  numberReady: 2
  observedGeneration: 1
  updatedNumberScheduled: 2
"""),
)
default_daemonset(STORED)


def stored(**spec: Any) -> dict:
    """The DaemonSet of a SchedExt, with the API server's defaults."""
    obj = STORED | {"spec": copy(sked.build_daemonset(given(**spec))["spec"])}
    default_daemonset(obj)
    return obj


# The clock is at 1000. A pod has to stay up for 10 s.
KINDS = yaml.safe_load("""
settled: {up_since: 989.0}
of the current template: {up_since: 989.0, template_generation: "1"}
young: {up_since: 991.0}
starting: {}
crashing: {reason: CrashLoopBackOff, message: exit code 1}
recovered: {up_since: 989.0, reason: CrashLoopBackOff, message: exit code 1}
unready: {up_since: 993.0, is_up: false, reason: CrashLoopBackOff, message: exit code 1}
older: {up_since: 989.0, revision: r0}
lost: {up_since: 989.0, is_up: false}
""")
# A pod with an injected sidecar.
KUBELET_POD = yaml.safe_load("""
metadata:
  name: p
  namespace: tools
  labels: {controller-revision-hash: r1, pod-template-generation: "3"}
  ownerReferences: [{kind: DaemonSet, name: scx-rusty, uid: d-1, controller: true}]
spec:
  nodeName: n1
  containers: [{name: spy, image: spy}, {name: scx, image: "ghcr.io/schedkit/scx_rusty:latest"}]
""")


def kubelet_pod(scx: dict, probe: dict | None = None, **status: Any) -> dict:
    """A pod whose scheduler and optional probe are in these states."""
    spy = {"name": "spy", "restartCount": 5, "state": {"waiting": {"reason": "ErrImagePull"}}}
    statuses = {"spy": spy, "scx": scx, "probe": probe}
    blank = {"ready": False, "restartCount": 0, "state": {}, "lastState": {}}
    status["containerStatuses"] = [
        {"name": name} | blank | state for name, state in statuses.items() if state is not None
    ]
    obj = copy(merge(KUBELET_POD, {"status": status}))
    if probe is not None:
        obj["spec"]["containers"] += [{"name": "probe", "image": "busybox:stable"}]
    return obj


def up(seconds: int, ready: bool = True) -> dict:
    """The state of a container that has run for so long."""
    return {"ready": ready, "state": {"running": {"startedAt": now(seconds)}}}


@cases(
    "container, status, reason, words",
    """
    starting: {container: {state: {waiting: {reason: ContainerCreating}}}, reason: ""}
    initializing: {container: {state: {waiting: {reason: PodInitializing}}}, reason: ""}
    no state yet: {reason: ""}
    image gone after a crash:
      container:
        state: {waiting: {reason: ImagePullBackOff, message: gone}}
        lastState: {terminated: {exitCode: 1, reason: Error}}
        restartCount: 3
      reason: ImagePullBackOff
      words: gone
    second crash:
      container:
        state: {terminated: {exitCode: 2, reason: Error}}
        lastState: {terminated: {exitCode: 1, reason: Error}}
        restartCount: 1
      words: exit code 2, 1 restart; see 'kubectl logs -n tools p -c scx --previous'
    backing off:
      container:
        state: {waiting: {reason: CrashLoopBackOff, message: back-off 10s}}
        lastState: {terminated: {exitCode: 2, reason: Error}}
        restartCount: 7
      words: exit code 2, 7 restarts; see 'kubectl logs -n tools p -c scx --previous'
    up again, exit code lost:
      container: {state: {running: {}}, restartCount: 3}
      words: exit code unknown, 3 restarts; see 'kubectl logs -n tools p -c scx --previous'
    first crash, out of memory:
      container: {state: {terminated: {exitCode: 137, reason: OOMKilled}}}
      words: exit code 137 (OOMKilled); see 'kubectl logs -n tools p -c scx'
    termination message:
      container:
        state: {terminated: {exitCode: 1, message: "cannot attach:\\n Device or resource busy\\n"}}
      words: "exit code 1: cannot attach: | Device or resource busy;
         see 'kubectl logs -n tools p -c scx'"
    the image's program does not exist:
      container:
        state: {terminated: {exitCode: 127, reason: Error}}
        restartCount: 1
      words: exit code 127, 1 restart; see 'kubectl describe pod -n tools p'
    evicted:
      status: {phase: Failed, reason: Evicted, message: disk pressure}
      reason: Evicted
      words: disk pressure
    unschedulable:
      status:
        conditions:
        - {type: PodScheduled, status: "False", reason: Unschedulable, message: 0/3 nodes}
      reason: Unschedulable
      words: 0/3 nodes
    """,
    reason="CrashLoopBackOff",
    words="",
    container={},
    status={},
)
def test_a_pods_problem_is_summarized(container, status, reason, words):
    pod = sked.read_pod(kubelet_pod(container, **status), None, 1000.0)
    assert (pod.key, pod.node, pod.template_generation) == (("tools", "scx-rusty"), "n1", "3")
    assert (pod.reason, pod.message) == (reason, words)


def test_a_long_termination_message_keeps_its_end():
    died = {"exitCode": 1, "message": "noise " * 500 + "the end"}
    message = sked.read_pod(kubelet_pod({"state": {"terminated": died}}), None, 1000.0).message
    assert "the end; see" in message
    assert len(message) < 400


def test_any_other_long_message_keeps_its_beginning():
    waiting = {"reason": "ErrImagePull", "message": "no " * 999}
    pod = sked.read_pod(kubelet_pod({"state": {"waiting": waiting}}), None, 1000.0)
    assert pod.message == ("no " * 999)[:1000]


@cases(
    "scx, probe, reason, words",
    """
    nothing is attached yet:
      probe: {state: {running: {startedAt: "2026-01-01T00:00:00Z"}}}
      reason: ""
      words: ""
    nothing is attached an hour after a crash:
      scx: {ready: true, restartCount: 1, state: {running: {startedAt: "2026-01-01T00:00:00Z"}}}
      probe: &nothing
        restartCount: 1
        state:
          terminated: {exitCode: 1, finishedAt: "2026-01-01T01:00:00Z", message: "it is 'disabled'"}
      words: "it is 'disabled'; its log may say why: 'kubectl logs -n tools p -c scx'"
    the scheduler crashes:
      scx: {restartCount: 1, state: &crash {terminated: {exitCode: 1}}}
      probe: *nothing
      reason: CrashLoopBackOff
      words: exit code 1, 1 restart; see 'kubectl logs -n tools p -c scx --previous'
    the scheduler crashes and is up briefly:
      scx:
        ready: true
        restartCount: 7
        state: {running: {startedAt: "2026-01-01T00:59:50Z"}}  # 10 s before the probe ended
        lastState: *crash
      probe: *nothing
      reason: CrashLoopBackOff
      words: exit code 1, 7 restarts; see 'kubectl logs -n tools p -c scx --previous'
    the probe's image cannot be pulled:
      probe: {state: {waiting: {reason: ErrImagePull, message: not found}}}
      reason: ErrImagePull
      words: "the probe does not run (its image needs sh and grep): not found"
    the kubelet lost both containers and their times:
      scx: {restartCount: 1, state: {running: {startedAt: "2026-01-01T00:00:00Z"}}}
      probe: {restartCount: 1, lastState: {terminated: {exitCode: 137, finishedAt: null}}}
      reason: CrashLoopBackOff
      words: exit code unknown, 1 restart; see 'kubectl logs -n tools p -c scx --previous'
    the probe backs off and the kubelet lost how it ended:
      probe: {restartCount: 3, state: {waiting: {reason: CrashLoopBackOff}}}
      words: "no scheduler is attached; its log may say why: 'kubectl logs -n tools p -c scx'"
    grep in the probe's image may not be run:
      probe: {restartCount: 1, state: {terminated: {exitCode: 126, reason: Error}}}
      reason: CrashLoopBackOff
      words: "the probe does not run (its image needs sh and grep): exit code 126, 1 restart;
         see 'kubectl describe pod -n tools p'"
    the probe's image has no shell:
      probe:
        restartCount: 1
        state: {terminated: {exitCode: 128, reason: StartError, message: no sh in it}}
      reason: CrashLoopBackOff
      words: "the probe does not run (its image needs sh and grep): exit code 128 (StartError),
         1 restart: no sh in it; see 'kubectl describe pod -n tools p'"
    """,
    scx=up(60),
    reason="NotAttached",
)
def test_the_probe_reports_not_attached_unless_the_scheduler_itself_failed(
    scx, probe, reason, words
):
    pod = sked.read_pod(kubelet_pod(scx, probe), None, 1000.0)
    assert (pod.reason, pod.message, pod.is_up) == (reason, words, False)


def test_an_unbound_pods_node_is_read_from_its_affinity():
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n7"]}]}
    rules = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    pod = kubelet_pod({}) | {"spec": {"affinity": {"nodeAffinity": rules}}, "status": {}}
    assert sked.read_pod(pod, None, 1000.0).node == "n7"
    assert sked.read_pod(pod | {"spec": {}}, None, 1000.0).node == ""


@cases(
    "started_ago, ready, watched, up_since",
    """
    up for a minute before sked started: {started_ago: 60, up_since: 940}
    the node's clock is ahead: {started_ago: -3600, up_since: 1000}
    sked saw it start and the node's clock is behind:
      started_ago: 3600
      watched: true
      up_since: 1000
    not ready yet: {started_ago: 60, ready: false, up_since: null}
    """,
    ready=True,
    watched=False,
)
def test_a_pod_has_been_up_since_it_started_or_since_sked_saw_it_start(
    started_ago, ready, watched, up_since
):
    before = sked.read_pod(kubelet_pod({}), None, 1000.0) if watched else None
    # the node controller marks pods unready whenever their node is lost; that does not count
    lost = [{"type": "Ready", "status": "False"}]
    obj = kubelet_pod(up(started_ago, ready), conditions=lost)
    pod = sked.read_pod(obj, before, 1000.0)
    assert pod.up_since == (pytest.approx(up_since, abs=30) if up_since else None)
    again = sked.read_pod(kubelet_pod(up(started_ago, not ready)), pod, 2000.0)
    expected = pod.up_since if ready else 2000.0  # the kubelet restarts, or it becomes ready
    assert (again.is_up, again.up_since) == (not ready, expected)


def test_a_pod_with_a_probe_is_up_when_both_containers_are():
    pod = sked.read_pod(kubelet_pod(up(900), up(60)), None, 1000.0)
    assert pod.up_since == pytest.approx(940, abs=30)


def test_a_change_of_a_pod_wakes_its_schedext_after_a_moment(mocker):
    operator = mocker.Mock()
    [pod] = pods_of(["settled"])
    sked.Pods(operator, "").changed(pod, None)
    operator.queue.add.assert_called_once_with(pod.key, sked.GATHER_SECONDS)


# ---------------------------------------------------------------- the stamp and the plan

# The stamp of STORED. Its hashes are the same in every process and version: other ones would
# restart the pods of every parked DaemonSet at the next upgrade.
STAMP = {"wish": "1591337f3475d451", "runs": "20f56fcac38cc715", "parked": False, "generation": 1}
LATER = {"metadata": {"generation": 2}, "status": {"observedGeneration": 2}}


def stamped(obj: dict, **stamp: Any) -> dict:
    """The DaemonSet with sked's stamp, with these changes of the stamp."""
    return noted(obj, json.dumps(STAMP | stamp))


def noted(obj: dict, text: str | None) -> dict:
    """The DaemonSet with this text where the stamp belongs."""
    return merge(obj, {"metadata": {"annotations": {STAMP_ANNOTATION: text}}})


def stamp_on(obj: dict) -> dict:
    return json.loads(obj["metadata"]["annotations"][STAMP_ANNOTATION])


def pods_of(kinds: Iterable[str]) -> list[sked.Pod]:
    """Pods of these kinds, on the nodes n1, n2 and so on."""
    blank = sked.read_pod(kubelet_pod({}), None, 1000.0)
    return [
        blank._replace(node=f"n{n}", name=f"p{99 - n}", **{"is_up": "up_since" in kind} | kind)
        for n, kind in enumerate((KINDS[name] for name in kinds), 1)
    ]


def planned(
    have: dict | None,
    pools: Iterable[str] = (),
    pods: Iterable[str] = (),
    is_fighting: bool = False,
    **spec: Any,
) -> dict | None:
    """What sked would write if this SchedExt, which yields to these pools, has this DaemonSet."""
    winners = [sked.claim_of(for_nodes(labels, "pool")) for labels in pools]
    stamp = sked.stamp_of(have) if have else sked.NO_STAMP
    seen = sked.Observed(given(**spec), have, stamp, pods_of(pods), winners, is_fighting)
    return sked.plan(seen)


def repairs(have: dict, target: dict) -> bool:
    """Whether sked takes this write for one that undoes an edit."""
    return sked.is_repair(have, sked.stamp_of(have), sked.stamp_of(target))


def answered(target: dict) -> dict:
    """What the API server makes of a DaemonSet that is written."""
    obj = copy(target)
    default_daemonset(obj)
    return obj


def changed(path: str, value: Any, have: dict = STORED) -> dict:
    """A DaemonSet with another value at this path; a number is a place in a list."""
    obj = copy(have)
    *parents, last = path.split(".")
    inner = obj
    for step in parents:
        inner = inner[int(step)] if step.isdecimal() else inner.setdefault(step, {})
    if last.isdecimal():
        inner.append(value)
    else:
        inner[last] = value
    return obj


def test_a_new_daemonset_is_created_with_its_stamp():
    target = planned(None)
    assert stamp_on(target) == STAMP
    assert target["metadata"].pop("annotations").keys() == {STAMP_ANNOTATION}
    assert target == PLAIN


@cases(
    "path, value",
    """
    nothing: [metadata.generation, 1]
    admission rewrote the image: [spec.template.spec.containers.0.image, mirror/scx]
    admission set another strategy: [spec.updateStrategy, {type: OnDelete}]
    admission added a toleration: [spec.template.spec.tolerations, [{operator: Exists}]]
    a label of another client: [metadata.labels.theirs, x]
    an annotation of another client: [metadata.annotations.theirs, x]
    """,
)
def test_what_our_last_write_became_needs_no_other_write(path, value):
    assert planned(changed(path, value, stamped(STORED))) is None


@cases(
    "path, value, named",
    """
    an image: [template.spec.containers.0.image, evil, containers.scx.image]
    a command: [template.spec.containers.0.command, [sh], containers.scx.command]
    an argument: [template.spec.containers.0.args, [-v], containers.scx.args]
    a variable: [template.spec.containers.0.env, [{name: A, value: b}], containers.scx.env]
    a mount: [template.spec.containers.0.volumeMounts, [{name: v, mountPath: /v}], volumeMounts]
    a limit: [template.spec.containers.0.resources, {limits: {cpu: "1"}}, resources.limits]
    no privileges: [template.spec.containers.0.securityContext, {privileged: false}, privileged]
    another container: [template.spec.containers.1, {name: spy, image: spy}, containers.spy]
    hostPID: [template.spec.hostPID, true, hostPID]
    a toleration: [template.spec.tolerations, [{operator: Exists}], tolerations]
    a priority: [template.spec.priorityClassName, high, priorityClassName]
    a pull secret: [template.spec.imagePullSecrets, [{name: s}], imagePullSecrets]
    a volume: [template.spec.volumes, [{name: v, emptyDir: {}}], volumes]
    a nodeSelector: [template.spec.nodeSelector, {a: b}, nodeSelector]
    an affinity:
    - template.spec.affinity.nodeAffinity
    - {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{}]}}
    - affinity
    a label of the pods: [template.metadata.labels.managed-by, me, labels.managed-by]
    a strategy: [updateStrategy.rollingUpdate.maxUnavailable, 9, maxUnavailable]
    another strategy: [updateStrategy, {type: OnDelete}, updateStrategy]
    minReadySeconds: [minReadySeconds, 5, minReadySeconds]
    """,
)
def test_an_edit_of_what_sked_owns_is_undone_and_named(path, value, named):
    have = merge(changed(f"spec.{path}", value, stamped(STORED)), LATER)
    target = planned(have)
    answer = answered(target)
    assert answer["spec"] == STORED["spec"]
    assert stamp_on(target) == STAMP | {"generation": 2}  # not ahead of what is there
    changes = sked.changed_fields(have, answer)
    assert repairs(have, target)
    assert all(named in change for change in changes)
    assert changes


@cases(
    "path, value",
    """
    rollout restart:
    - spec.template.metadata.annotations
    - {kubectl.kubernetes.io/restartedAt: now}
    an init container: [spec.template.spec.initContainers, [{name: theirs, image: i}]]
    a hook: [spec.template.spec.containers.0.lifecycle, {preStop: {sleep: {seconds: 1}}}]
    a label of the pods: [spec.template.metadata.labels.theirs, x]
    the history limit: [spec.revisionHistoryLimit, 3]
    """,
)
def test_an_edit_of_anything_else_stays_and_is_told_to_nobody(path, value):
    have = merge(changed(path, value, stamped(STORED)), LATER)
    target = planned(have)
    assert answered(target)["spec"] == have["spec"]
    assert sked.changed_fields(have, answered(target)) == []


@cases(
    "have, kept",
    """
    the label:
      have: {labels: {managed-by: null, theirs: x}}
      kept: {labels: {managed-by: sked-controller, theirs: x}}
    another value of the label:
      have: {labels: {managed-by: helm}}
      kept: {labels: {managed-by: sked-controller}}
    the owner beside another one:
      have: {ownerReferences: [{kind: App, name: a, uid: o-1}]}
      kept: {ownerReferences: [{kind: App, name: a, uid: o-1}, mine]}
    the owner of an orphan: {have: {ownerReferences: null}, kept: {}}
    the owner that lost its control:
      have: {ownerReferences: [{kind: SchedExt, name: scx-rusty, uid: u-1}]}
      kept: {ownerReferences: [mine]}
    """,
)
def test_a_lost_label_or_owner_comes_back_beside_those_of_others(have, kept):
    """The spec stays as it is, whatever admission has made of it."""
    (mine,) = STORED["metadata"]["ownerReferences"]
    owners = [mine if owner == "mine" else owner for owner in kept.pop("ownerReferences", [mine])]
    daemonset = changed(
        "spec.template.spec.containers.0.image",
        "mirror/scx",
        merge(stamped(STORED), {"metadata": have}),
    )
    target = planned(daemonset)
    assert target["spec"] == daemonset["spec"]
    assert stamp_on(target) == STAMP
    assert target["metadata"]["ownerReferences"] == owners
    assert target["metadata"]["labels"] == kept.get("labels", STORED["metadata"]["labels"])


@cases(
    "meta, spec, reason, words",
    """
    it is on its way out:
      meta: {deletionTimestamp: now}
      reason: RollingOut
      words: waiting for the old DaemonSet scx-rusty to be deleted
    it is somebody else's and on its way out:
      meta: {deletionTimestamp: now, labels: null, ownerReferences: null}
      reason: RollingOut
      words: waiting for the old DaemonSet scx-rusty to be deleted
    it belongs to an earlier SchedExt of the same name:
      meta: {ownerReferences: [{kind: SchedExt, name: scx-rusty, uid: u-0, controller: true}]}
      reason: RollingOut
      words: waiting for the old DaemonSet scx-rusty to be deleted
    it has neither an owner nor our label: &taken
      meta: {labels: null, ownerReferences: null}
      reason: NameTaken
      words: "a DaemonSet scx-rusty exists that is not sked's: give this SchedExt another name, or
         delete that DaemonSet with 'kubectl delete daemonset -n tools scx-rusty'; sked looks again
         within a minute"
    it belongs to somebody else:
      <<: *taken
      meta: {ownerReferences: [{kind: App, name: scx-rusty, uid: o-1, controller: true}]}
    it selects other pods:
      <<: *taken
      meta: {ownerReferences: null}
      spec: {selector: {matchLabels: {app: scx-rusty}}}
    """,
    spec={},
)
def test_a_daemonset_that_is_not_ours_is_not_written(meta, spec, reason, words):
    have = merge(stamped(STORED), {"metadata": meta, "spec": spec})
    with pytest.raises(sked.Blocked) as blocked:
        planned(have, sched=LAVD)
    assert (blocked.value.reason, str(blocked.value)) == (reason, words)


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "x", "[]", "null", "1", "[" * 9999, "{}"),
        json.dumps(STAMP | {"more": 1}),
        json.dumps(STAMP | {"generation": True}),
        json.dumps(STAMP | {"generation": "1"}),
        json.dumps(STAMP | {"parked": 0}),
        json.dumps({name: STAMP[name] for name in ("wish", "runs", "parked")}),
    ],
)
def test_a_stamp_that_is_missing_or_nonsense_is_none_and_a_new_one_restarts_nobody(text):
    have = noted(STORED, text)
    target = planned(have)
    assert answered(target)["spec"] == STORED["spec"]
    assert stamp_on(target) == STAMP
    assert not repairs(have, target)


def test_a_stamp_is_not_believed_on_a_copy_that_someone_else_has_created():
    have = stamped(STORED)
    have["metadata"]["managedFields"] = [{"manager": "sked"}, {"manager": "kubectl-edit"}]
    assert sked.Memory(given()).stamp_to_trust(have) == sked.stamp_of(have)
    have["metadata"]["managedFields"] = [{"manager": "kubectl-replace"}]
    assert sked.Memory(given()).stamp_to_trust(have) == sked.NO_STAMP


@cases(
    "spec, changes",
    """
    a field is set: {spec: {minReadySeconds: 35}, changes: {spec: {minReadySeconds: 35}}}
    another strategy:
      spec: {updateStrategy: {type: OnDelete}}
      changes: {spec: {updateStrategy: {type: OnDelete, rollingUpdate: null}}}
    """,
)
def test_a_wish_outside_the_template_leaves_the_template_as_admission_made_it(spec, changes):
    have = changed("spec.template.spec.containers.0.image", "mirror/scx", stamped(STORED))
    target = planned(have, **spec)
    assert answered(target)["spec"] == merge(have, changes)["spec"]
    assert not repairs(have, target)


def test_a_field_that_is_unset_goes_back_to_the_api_servers_default():
    fields = {"imagePullPolicy": "Never", "minReadySeconds": 5, "hostPID": True, "args": ["-v"]}
    have = stamped(stored(**fields), wish="former", runs="former")
    assert answered(planned(have))["spec"] == STORED["spec"]


@pytest.mark.parametrize(
    "image, policy", [("scx", "Always"), ("scx:v1", "IfNotPresent"), ("scx:latest", "Always")]
)
def test_an_unset_pull_policy_follows_a_new_image(image, policy):
    (container,) = pod_spec(answered(planned(stamped(STORED), sched=image)))["containers"]
    assert (container["image"], container["imagePullPolicy"]) == (image, policy)


# ---------------------------------------------------------------- parking


def parked_by(target: dict) -> bool:
    """Whether a write leaves the DaemonSet parked, by its strategy and by its stamp."""
    strategy = target["spec"].get("updateStrategy", {}).get("type")
    assert (strategy == "OnDelete") is stamp_on(target)["parked"]
    return stamp_on(target)["parked"]


def test_parking_changes_placement_strategy_and_stamp_and_nothing_else():
    have = changed("spec.template.spec.containers.0.image", "mirror/scx", stamped(STORED))
    target = planned(have, ["pool=latency"], ["settled", "settled"])
    assert target["spec"].pop("updateStrategy") == {"type": "OnDelete"}
    assert terms({"spec": target["spec"]}) == ["pool!=latency"]
    del pod_spec(target)["affinity"]
    assert stamp_on(target) == STAMP | {"wish": "06e33d859b0afb67", "parked": True, "generation": 2}
    del have["spec"]["updateStrategy"]
    assert target["spec"] == have["spec"]


@cases(
    "spec, changes, pods, expected",
    """
    all pods are current: {expected: true}
    a new nodeSelector: {spec: {nodeSelector: {a: b}}, expected: true}
    a new minReadySeconds: {spec: {minReadySeconds: 35}, pods: [settled], expected: true}
    one is on a tainted node: {changes: {status: {numberMisscheduled: 1}}, expected: true}
    a node is lost: {changes: {status: {desiredNumberScheduled: 3}}, expected: true}
    there is one node:
      changes: {status: {currentNumberScheduled: 1, updatedNumberScheduled: 1}}
      pods: [settled]
      expected: true
    the status still counts a lost node:
      changes: {status: {currentNumberScheduled: 3}}
      pods: [of the current template, settled]
      expected: true
    all pods are old except one that is being deleted:
      changes: {status: {updatedNumberScheduled: 1}}
      pods: [older, older]
    all nodes are lost and their pods are old:
      changes: {status: {currentNumberScheduled: 0, updatedNumberScheduled: null}}
      pods: [older, older]
    a new image: {spec: {sched: scx}}
    a new limit: {spec: {resources: {limits: {cpu: 1}}}}
    no pods yet:
      changes: {status: {currentNumberScheduled: 0, updatedNumberScheduled: 0}}
      pods: []
      expected: true
    no nodes: {changes: {status: {currentNumberScheduled: 0, desiredNumberScheduled: 0,
      numberReady: 0, updatedNumberScheduled: 0}}, pods: []}
    the pod watch hangs and all nodes are lost:
      changes:
        status: {currentNumberScheduled: 0, updatedNumberScheduled: 0, numberMisscheduled: 2}
      pods: []
    the pod watch hangs: {pods: [settled, older], expected: true}
    the pods say that one is old:
      changes: {status: {numberMisscheduled: 1}}
      pods: [settled, older]
    somebody edited the DaemonSet, and its pods may run the edit:
      changes: {metadata: {generation: 2}, status: {observedGeneration: 2}}
    """,
    pods=["settled", "settled"],
    expected=False,
    spec={},
    changes={},
)
def test_a_daemonset_is_parked_if_only_its_placement_changes_and_its_pods_are_current(
    spec, changes, pods, expected
):
    have = merge(stamped(STORED), changes)
    assert parked_by(planned(have, ["pool=latency"], pods, **spec)) is expected


def test_an_edit_is_undone_before_a_pool_moves_the_daemonset():
    have = merge(changed("spec.minReadySeconds", 5, stamped(STORED)), LATER)
    target = planned(have, ["pool=latency"], ["settled", "settled"])
    answer = answered(target)
    assert repairs(have, target)
    assert answer["spec"] == STORED["spec"]
    after = merge(noted(answer, json.dumps(stamp_on(target) | {"generation": 2})), LATER)
    assert parked_by(planned(after, ["pool=latency"], ["settled", "settled"]))


def test_an_edit_of_the_placement_is_undone_although_the_pool_that_came_is_gone_again():
    have = merge(changed("spec.template.spec.nodeSelector", {"a": "b"}, stamped(STORED)), LATER)
    target = planned(have, ["pool=latency"], ["settled", "settled"])
    after = merge(noted(target, json.dumps(stamp_on(target) | {"generation": 2})), LATER)
    assert "nodeSelector" not in pod_spec(planned(after, [], ["settled", "settled"]))


def test_a_pool_does_not_wait_for_the_end_of_a_fight():
    have = merge(changed("spec.minReadySeconds", 5, stamped(STORED)), LATER)
    target = planned(have, ["pool=latency"], ["settled", "settled"], is_fighting=True)
    assert terms(target) == ["pool!=latency"]


def test_without_a_stamp_nothing_is_parked():
    """Nobody knows what the pods of such a DaemonSet run."""
    assert not parked_by(planned(STORED, ["pool=latency"], ["settled", "settled"]))


def test_parking_waits_until_the_controller_has_seen_the_last_change():
    have = merge(stamped(STORED), {"status": {"observedGeneration": 0}})
    with pytest.raises(sked.Blocked, match="waiting for the DaemonSet controller"):
        planned(have, ["pool=latency"])


def pooled(changes: dict | None = None) -> dict:
    """STORED after sked has parked it because of a pool; its pods are of the former template."""
    target = planned(stamped(STORED), ["pool=latency"], ["settled", "settled"])
    counts = {"status": {"observedGeneration": 2, "updatedNumberScheduled": None}}
    later = {"metadata": {"generation": 2}}
    return merge(merge(merge(answered(target), later), counts), changes or {})


@cases(
    "spec, pools, changes, pods, stays",
    """
    another pool: {pools: [pool=batch]}
    the pool is removed: {pools: []}
    a new nodeSelector: {spec: {nodeSelector: {a: b}}}
    suspended: {spec: {suspend: true}}
    a new minReadySeconds: {spec: {minReadySeconds: 35}}
    a new image: {spec: {sched: scx}, stays: false}
    a new probe: {spec: {probeImage: busybox}, stays: false}
    a new toleration: {spec: {tolerations: [{operator: Exists}]}, pools: [], stays: false}
    drift in the template:
      changes:
        metadata: {generation: 3}
        spec: {template: {spec: {tolerations: [{operator: Exists}]}}}
    drift in the strategy:
      changes: {metadata: {generation: 3}, spec: {updateStrategy: {type: RollingUpdate}}}
    drift in the strategy, by which pods may have been replaced:
      changes: {metadata: {generation: 3}, spec: {updateStrategy: {type: RollingUpdate}}}
      pods: [settled, of the current template]
      stays: false
    rollout restart:
      changes:
        metadata: {generation: 3}
        spec: {template: {metadata: {annotations: {kubectl.kubernetes.io/restartedAt: now}}}}
      stays: false
    another pool while all pods are current:
      pools: [pool=batch]
      changes: {status: {updatedNumberScheduled: 2}}
    """,
    stays=True,
    spec={},
    pools=["pool=latency"],
    changes={},
    pods=["settled", "settled"],
)
def test_a_parked_daemonset_stays_parked_until_its_pods_must_restart(
    spec, pools, changes, pods, stays
):
    target = planned(pooled(changes), pools, pods, **spec)
    assert parked_by(target) is stays


@cases(
    "changes, pods, expected",
    """
    by the counts: {changes: {updatedNumberScheduled: 2}, expected: true}
    by the pods:
      changes: {numberMisscheduled: 1}
      pods: [of the current template, settled]
      expected: true
    not all of them: {changes: {updatedNumberScheduled: 1}, pods: [settled, older]}
    none of them: {changes: {}}
    there are none:
      changes: {currentNumberScheduled: 0, desiredNumberScheduled: 0, numberReady: 0}
      pods: []
    the counts are of an earlier template:
      changes: {updatedNumberScheduled: 2, observedGeneration: 1}
    """,
    pods=["settled", "settled"],
    expected=False,
)
def test_a_parked_daemonset_gets_its_strategy_back_when_all_pods_are_current_anyway(
    changes, pods, expected
):
    have = pooled({"status": changes})
    have["metadata"]["annotations"][TEMPLATE_GENERATION] = "1"
    target = planned(have, ["pool=latency"], pods)
    if not expected:
        assert target is None
        return
    assert not parked_by(target)
    strategy = STORED["spec"]["updateStrategy"]
    assert answered(target)["spec"] == have["spec"] | {"updateStrategy": strategy}


# ---------------------------------------------------------------- what a write changed


def test_a_patch_sets_what_is_new_and_removes_what_is_gone():
    before = {"a": 1, "b": {"c": 1, "d": 2}, "e": [1], "f": {"g": 1}, "h": {"i": 1}}
    after = {"a": 1, "b": {"c": 1, "d": 3}, "e": [2], "f": {"g": 1}, "j": {}}
    assert sked.merge_patch(before, after) == {"b": {"d": 3}, "e": [2], "h": None, "j": {}}


def write_by(manager: str, second: int, subresource: str = "") -> dict:
    """An entry of managedFields."""
    entry = {"manager": manager, "time": f"2026-01-01T00:00:0{second}Z"}
    return entry | ({"subresource": subresource} if subresource else {})


@cases(
    "writes, editor",
    """
    nobody: [[], an unknown client]
    only sked: [[[sked, 2]], an unknown client]
    the last of two: [[[kubectl-edit, 3], [helm, 2]], kubectl-edit]
    in the second of our last write: [[[kubectl-edit, 3], [sked, 3]], kubectl-edit]
    not one before our last write, because a removed field leaves no trace:
    - [[kubectl-edit, 2], [sked, 3], [sked, 1, status]]
    - an unknown client
    not the writer of the status: [[[kubectl-edit, 2], [kcm, 3, status]], kubectl-edit]
    """,
)
def test_the_last_editor_is_neither_sked_nor_a_writer_of_the_status(writes, editor):
    entries = [write_by(*write) for write in writes]
    assert sked.last_editor({"metadata": {"managedFields": entries}}) == editor


def test_an_editor_may_have_no_time_or_no_name():
    for entry, editor in (({"manager": "old"}, "old"), ({"time": NOW}, "an unknown client")):
        assert sked.last_editor({"metadata": {"managedFields": [entry]}}) == editor


def test_a_label_named_containers_is_compared_as_any_other():
    before = merge(STORED, {"metadata": {"labels": {"containers": "a", "x.containers": "b"}}})
    after = merge(STORED, {"metadata": {"labels": {"containers": "c", "x.containers": "b"}}})
    stamp = {"metadata": {"annotations": {STAMP_ANNOTATION: json.dumps(STAMP)}}}
    changes = sked.changed_fields(merge(before, stamp), merge(after, stamp))
    assert changes == ["metadata.labels.containers"]


@pytest.mark.parametrize("parked, told", [(True, "spec.updateStrategy.type, "), (False, "")])
def test_the_strategy_is_told_of_unless_sked_itself_has_ended_parking(parked, told):
    have = stamped(STORED, parked=True)
    seen = sked.Observed(given(), have, sked.stamp_of(have), [], [])
    changes = ["spec.updateStrategy.type", "spec.minReadySeconds"]
    said = f"an unknown client changed {told}spec.minReadySeconds; sked has reverted it"
    assert sked.drift_message(seen, changes, parked) == said


# ---------------------------------------------------------------- status


NOW = "2026-01-02T03:04:05Z"


def observed(
    pods: list[str],
    spec: dict | None = None,
    changes: dict | None = None,
    winners: Iterable[dict] = (),
    **status: Any,
) -> sked.Observed:
    """A SchedExt with the stored DaemonSet, which wants two nodes, after these changes."""
    obj = given(**(spec or {})) | {"status": status}
    have = merge(STORED, changes or {})
    return sked.Observed(
        obj, have, sked.stamp_of(have), pods_of(pods), [*map(sked.claim_of, winners)]
    )


def status_of(seen: sked.Observed, steady: float = 0.0, blocked: Any = None) -> dict:
    """The status, if the counts have been the same for this many seconds."""
    return sked.build_status(seen, sked.summarize(seen, steady, 1000.0), blocked, NOW)


@cases(
    "pods, spec, changes, winners, steady, reason, words",
    """
    suspended a moment ago:
      spec: {suspend: true}
      changes: {metadata: {generation: 2}}
      words: waiting for the DaemonSet controller
    suspended while the last pods are ending:
      spec: {suspend: true}
      changes: {status: {desiredNumberScheduled: 0, numberMisscheduled: 2}}
      words: "suspended; waiting for pods to end: 2"
    no nodes:
      changes: {status: {desiredNumberScheduled: 0}}
      reason: NoNodes
      words: "no node to run on: check that 'kubectl get nodes' lists nodes, and their taints"
    no nodes match the nodeSelector:
      spec: {nodeSelector: {pool: latency, a: ""}}
      changes: {status: {desiredNumberScheduled: 0}}
      winners: [{labels: "pool=latency,a=,b=1"}, {labels: "b=1,c=1,d=1", name: a}]
      reason: NoNodes
      words: "no node to run on: check that 'kubectl get nodes --selector=a=,pool=latency' lists
         nodes, and their taints; if it does, these SchedExts may come first there: tools/a,
         tools/other"
    one has just started and the DaemonSet does not know yet:
      pods: [young]
      changes: {status: {numberReady: 0}}
      words: ready on 0 of 2 nodes, updated on 2; waiting for the pods to stay up for 10 s
    one is unready and the DaemonSet does not know yet:
      pods: [settled, lost]
      words: ready on 1 of 2 nodes, updated on 2
    the DaemonSet says one is old:
      pods: [settled, settled]
      changes: {status: {updatedNumberScheduled: 1}}
      words: ready on 2 of 2 nodes, updated on 1
    the DaemonSet says one is not ready:
      pods: [settled, settled]
      changes: {status: {numberReady: 1}}
      words: ready on 1 of 2 nodes, updated on 2
    a pod on a tainted node does not hide one that has just started:
      pods: [settled, settled, young]
      changes: {status: {numberMisscheduled: 1}}
      words: ready on 1 of 2 nodes, updated on 2; waiting for the pods to stay up for 10 s
    the pods say one is old: {pods: [settled, older], words: for the last old pods to go}
    the user's strategy is OnDelete and a new node has no pod yet:
      pods: [settled]
      changes:
        spec: {updateStrategy: {type: OnDelete}}
        status: {currentNumberScheduled: 1, updatedNumberScheduled: 1}
      words: ready on 1 of 2 nodes, updated on 1
    the user's strategy is OnDelete:
      pods: [settled, older]
      changes: {spec: {updateStrategy: {type: OnDelete}}, status: {updatedNumberScheduled: 1}}
      words: "run 'kubectl delete pod -n tools -l name=scx-rusty,managed-by=sked-controller'"
    parked:
      pods: [settled, older]
      changes:
        metadata: &parked
          annotations:
            sked.schedkit.io/applied: '{"wish":"w","runs":"r","parked":true,"generation":1}'
        status: {updatedNumberScheduled: null}
      reason: AllReady
      words: "running on 2 of 2 nodes; parked: only the choice of nodes has changed,
         so running pods were kept"
    parked and one has just started:
      pods: [older, young]
      changes:
        metadata: *parked
        status: {updatedNumberScheduled: 1}
      words: ready on 1 of 2 nodes, updated on 2; waiting for the pods to stay up for 10 s
    a new node has had no pod for a moment:
      pods: [settled]
      changes: {status: {currentNumberScheduled: 1, numberReady: 1}}
      steady: 9
      words: ready on 1 of 2 nodes, updated on 2
    a new node has had no pod for a while:
      pods: [settled]
      changes: {status: {currentNumberScheduled: 1, numberReady: 1}}
      steady: 10
      reason: NodesFailing
      words: "failing on 1 of 2 nodes; 1 without a pod: see 'kubectl describe daemonset -n tools
         scx-rusty'"
    no node has had a pod for a while:
      changes: {status: {currentNumberScheduled: 0, numberReady: 0}}
      steady: 10
      reason: NodesFailing
      words: "if the namespace forbids privileged pods, run 'kubectl label --overwrite namespace
         tools pod-security.kubernetes.io/enforce=privileged'"
    minReadySeconds is longer:
      pods: [settled, settled]
      changes: {spec: {minReadySeconds: 35}}
      words: ready on 0 of 2 nodes, updated on 2; waiting for the pods to stay up for 35 s
    an older one for the same nodes is suspended:
      winners: [{labels: "", suspend: true}]
      reason: Conflict
      words: "SchedExt tools/other, which is suspended, selects the same nodes and is older: delete
         one of the two, or give this one another nodeSelector"
    an older one for the same nodes is being deleted:
      winners: [{labels: "", leaving: true}]
      words: waiting for SchedExt tools/other to be deleted
    of two older ones for the same nodes the one that runs is named:
      winners: [{labels: "", name: third, created: "3"}, {labels: "", created: "2"}]
      reason: Conflict
      words: "SchedExt tools/other selects the same nodes and is older: delete one of the two, or
         give this one another nodeSelector"
    suspended beside an older one for the same nodes:
      spec: {suspend: true}
      changes: {status: {desiredNumberScheduled: 0}}
      winners: [{labels: ""}]
      reason: Suspended
      words: to resume
    all have settled, and one on a lost node fails:
      pods: [settled, settled, crashing]
      reason: AllReady
      words: running on 2 of 2 nodes
    all have settled, and one had crashed:
      pods: [settled, recovered]
      reason: AllReady
      words: running on 2 of 2 nodes
    """,
    pods=[],
    reason="RollingOut",
    spec={},
    changes={},
    winners=[],
    steady=0,
)
def test_the_ready_condition_gives_a_reason_and_a_message(
    pods, spec, changes, winners, steady, reason, words
):
    others = [for_nodes(**winner) for winner in winners]
    status = status_of(observed(pods, spec, changes, others), steady)
    ready = sked.condition(status, "Ready")
    is_so = reason in ("AllReady", "Suspended")
    assert (ready["reason"], ready["status"]) == (reason, str(is_so))
    assert ready["message"].endswith(words)


@pytest.mark.parametrize("names, words", [("abcde", ""), ("abcdefg", " and 2 more")])
def test_a_message_lists_at_most_five_names(names, words):
    assert sked.listed(list(names)) == f"a, b, c, d, e{words}"


def test_the_status_counts_nodes_lists_failures_and_keeps_foreign_conditions():
    expected = """
        observedGeneration: 1
        nodes: {desired: 2, ready: 1, updated: 2, failing: 1}
        failures: [{node: n2, pod: p97, reason: CrashLoopBackOff, message: exit code 1}]
        conditions:
        - {type: Approved, status: "True"}
        - type: Ready
          status: "False"
          reason: NodesFailing
          message: "failing on 1 of 2 nodes; n2: CrashLoopBackOff: exit code 1"
          observedGeneration: 1
          lastTransitionTime: "2026-01-02T03:04:05Z"
        """
    theirs = [{"type": "Approved", "status": "True"}]
    status = status_of(observed(["settled", "crashing"], conditions=theirs, observedGeneration=0))
    assert status == yaml.safe_load(expected)


def test_ten_failures_are_listed_by_node_and_all_are_counted():
    wanted = {"status": {"desiredNumberScheduled": 12, "currentNumberScheduled": 12}}
    status = status_of(observed(["crashing"] * 12, changes=wanted))
    listed = [failure["node"] for failure in status["failures"]]
    assert " ".join(listed) == "n1 n10 n11 n12 n2 n3 n4 n5 n6 n7"
    assert status["nodes"]["failing"] == 12


def test_no_more_nodes_fail_than_are_wanted_although_lost_nodes_have_pods_that_fail():
    status = status_of(observed(["crashing"] * 3))
    assert status["nodes"] == {"desired": 2, "ready": 0, "updated": 2, "failing": 2}


@pytest.mark.parametrize(
    "reason, is_stalled",
    [("NameTaken", True), ("Conflict", True), ("Rejected", True), ("RollingOut", False)],
)
def test_what_waiting_does_not_fix_is_stalled_until_it_is_over(reason, is_stalled):
    seen = observed(["crashing"])
    conditions = status_of(seen, blocked=sked.Blocked(reason, "why", 60))["conditions"]
    said = [(c["type"], c["status"], c["reason"], c["message"]) for c in conditions]
    stalled = ("Stalled", "True", reason, "why")
    assert said == [("Ready", "False", reason, "why"), stalled][: 1 + is_stalled]
    later = status_of(observed(["settled", "settled"], conditions=conditions))
    assert [(c["type"], c["reason"]) for c in later["conditions"]] == [("Ready", "AllReady")]


@pytest.mark.parametrize("pods, moved", [(["young"], False), (["settled", "settled"], True)])
def test_the_transition_time_moves_only_with_the_conditions_status(pods, moved):
    before = {"type": "Ready", "status": "False", "lastTransitionTime": "before"}
    (ready,) = status_of(observed(pods, conditions=[before]))["conditions"]
    assert ready["lastTransitionTime"] == (NOW if moved else "before")


def test_a_daemonset_of_another_owner_counts_for_nothing():
    """Such as that of an earlier SchedExt, which the garbage collector has yet to delete."""
    theirs = {"metadata": {"ownerReferences": [{"controller": True, "uid": "another"}]}}
    status = status_of(observed(["settled", "crashing"], changes=theirs), 60.0)
    assert (status["nodes"], status["failures"]) == (ready_on(0), [])


@cases(
    "pods, changes, steady, blocked, seconds",
    """
    nothing is under way: {pods: [settled, settled]}
    an earlier crash of an unready pod is forgotten: {pods: [settled, unready], seconds: 3}
    a node has no pod:
      pods: [settled]
      changes: {status: {currentNumberScheduled: 1}}
      steady: 4
      seconds: 6
    a node has had no pod for a while:
      pods: [settled]
      changes: {status: {currentNumberScheduled: 1}}
      steady: 10
    one pod settles after the other: {pods: [unready, young], seconds: 1}
    the DaemonSet is not ours: {pods: [young], changes: {metadata: {ownerReferences: null}}}
    blocked: {pods: [], blocked: 60, seconds: 60}
    blocked while a pod settles: {pods: [young], blocked: 60, seconds: 1}
    """,
    seconds=math.inf,
    changes={},
    steady=0,
    blocked=0,
)
def test_sked_looks_again_when_time_alone_may_change_the_status(
    pods, changes, steady, blocked, seconds
):
    summary = sked.summarize(observed(pods, changes=changes), steady, 1000.0)
    reason = sked.Blocked("NameTaken", "why", blocked) if blocked else None
    assert sked.next_change_in(summary, steady, reason) == seconds


# ---------------------------------------------------------------- build_event


def test_an_event_names_its_schedext_and_cuts_a_long_message():
    expected = """
        apiVersion: v1
        kind: Event
        metadata: {generateName: scx-rusty.}
        involvedObject:
          apiVersion: sked.schedkit.io/v1
          kind: SchedExt
          namespace: tools
          name: scx-rusty
          uid: u-1
        type: Warning
        reason: Rejected
        source: {component: sked}
        firstTimestamp: "2026-01-02T03:04:05Z"
        lastTimestamp: "2026-01-02T03:04:05Z"
        """
    event = sked.build_event(given(), "Warning", "Rejected", "m" * 2000, "2026-01-02T03:04:05Z")
    assert event == yaml.safe_load(expected) | {"message": "m" * 1024}


# ---------------------------------------------------------------- the API server


A_LIST = "/apis/sked.schedkit.io/v1/schedexts"


def call_fails(api: sked.Api, words: str) -> bool:
    with pytest.raises(sked.ApiError, match=words):
        api.request("GET", A_LIST)
    return True


@pytest.fixture
def secure() -> Iterator[ApiServer]:
    """An API server with TLS, whose certificate has no Authority Key Identifier."""
    with ApiServer(serving_tls()) as server:
        yield server


@cases(
    "host, cluster, words",
    """
    right CA and host, no Authority Key Identifier:
    - 127.0.0.1
    - {certificate-authority: ca.crt}
    - ""
    wrong CA: [127.0.0.1, {certificate-authority: x.crt}, self-signed]
    wrong host: [localhost, {certificate-authority: ca.crt}, Hostname mismatch]
    tls-server-name: [localhost, {certificate-authority: ca.crt, tls-server-name: 127.0.0.1}, ""]
    insecure: [localhost, {insecure-skip-tls-verify: true}, ""]
    """,
)
def test_the_server_certificate_is_checked_the_way_kubectl_does_it(secure, host, cluster, words):
    openssl(authority(), f"req -x509 -subj /CN=x {NEW_KEY} -keyout x.key -out x.crt")
    cluster |= {"server": f"https://{host}:{secure.port}"}
    path = authority() / "config"  # next to the files that it names
    api = connect(write_kubeconfig(path, "x", {"x": cluster}, {"token": "sked"}))
    assert call_fails(api, words) if words else api.request("GET", A_LIST)
    assert api.pool.ca_certs is None  # no connection loads them again


CREDENTIAL = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}


def plugin_kubeconfig(server: ApiServer, command: str, *args: str) -> Path:
    """A kubeconfig whose token comes from a credential plugin."""
    cluster = {"server": f"https://127.0.0.1:{server.port}"}
    cluster["certificate-authority"] = str(authority() / "ca.crt")
    plugin = {"apiVersion": CREDENTIAL["apiVersion"], "command": command, "args": list(args)}
    return write_kubeconfig(server.folder / "plugin", "x", {"x": cluster}, {"exec": plugin})


def test_a_failed_credential_plugin_is_run_again_and_no_request_goes_without_a_token(secure):
    answer = secure.folder / "answer"
    api = connect(plugin_kubeconfig(secure, "cat", str(answer)))
    for token in ("first", "second"):
        assert call_fails(api, "credential plugin 'cat' failed: .*No such file")
        answer.write_text(json.dumps(CREDENTIAL | {"status": {"token": token}}))
        secure.tokens[token] = "sked"
        assert api.request("GET", A_LIST)
        del secure.tokens[token]
        answer.unlink()
        assert call_fails(api, "Unauthorized")
    assert {request.user for request in secure.requests} == {"sked"}


def test_a_credential_plugin_that_is_not_there_when_the_token_expires_is_named(
    secure, monkeypatch, caplog
):
    monkeypatch.setattr(sked, "METRICS", sked.Metrics())
    plugin = secure.folder / "plugin.sh"
    status = {"token": "sked", "expirationTimestamp": "2001-01-01T00:00:00Z"}
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(CREDENTIAL | {'status': status})}'")
    plugin.chmod(0o700)
    api = connect(plugin_kubeconfig(secure, str(plugin)))
    assert api.request("GET", A_LIST)
    plugin.rename(secure.folder / "away")
    counted = sked.METRICS.copy()
    monkeypatch.setattr(sked, "monotonic", lambda: time.monotonic() + 2)
    assert call_fails(api, re.escape(f"credential plugin '{plugin}' failed: [Errno 2] No such"))
    assert counted == sked.METRICS  # nothing was sent
    assert caplog.messages == []
    (secure.folder / "away").rename(plugin)
    assert api.request("GET", A_LIST)


def test_a_response_that_breaks_off_is_counted_as_one_request(secure, monkeypatch):
    monkeypatch.setattr(sked, "METRICS", sked.Metrics())
    secure.fault("GET", A_LIST, 1, "truncate")
    assert call_fails(connect(secure.kubeconfig("sked")), "cannot talk to the API server")
    assert sked.METRICS == {'rest_client_requests_total{code="200",method="GET"}': 1}


def test_a_rotated_token_is_read_again(in_pod, secure, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(secure.port))
    secure.tokens["first"] = "sked"
    api = connect(None)
    assert api.request("GET", A_LIST)
    secure.tokens["second"] = secure.tokens.pop("first")
    assert call_fails(api, "Unauthorized")
    (in_pod / "token").write_text("second")
    assert api.request("GET", A_LIST)


def test_a_renewed_ca_is_read_again(secure):
    kubeconfig = secure.kubeconfig("sked")
    renewed = kubeconfig.read_text()
    other = encoded(sign("other")[0])
    kubeconfig.write_text(renewed.replace(encoded(authority() / "ca.crt"), other))
    api = connect(kubeconfig)
    assert call_fails(api, "self-signed")
    kubeconfig.write_text(renewed)
    assert api.request("GET", A_LIST)


def first_line(listener: socket.socket, kubeconfig: Path) -> bytes:
    """What sked sends to somebody who listens and does not answer."""
    with pytest.raises(sked.ApiError, match="timed out"):
        connect(kubeconfig).request("GET", "/api", timeout=0.1, a=1)
    with listener.accept()[0] as connection:
        return connection.recv(100).partition(b"\r\n")[0]


def test_a_proxy_is_asked_for_a_tunnel_to_the_api_server(home, monkeypatch):
    write_kubeconfig(home / "tls", "x", {"x": {"server": "https://e1"}}, {})
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        assert first_line(proxy, home / "tls").startswith(b"CONNECT e1:443 HTTP/1.")


def test_an_api_server_behind_a_path_is_asked_there(home):
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        cluster = {"server": f"http://127.0.0.1:{gateway.getsockname()[1]}/clusters/a"}
        write_kubeconfig(home / "path", "x", {"x": cluster}, {})
        assert first_line(gateway, home / "path") == b"GET /clusters/a/api?a=1 HTTP/1.1"


# ---------------------------------------------------------------- watching


def metrics_in(text: str) -> dict[str, float]:
    """The samples, by name and labels; fails on text that Prometheus would refuse."""
    samples: dict[str, float] = {}
    assert text.count("# HELP") == text.count("# TYPE")
    for line in text.splitlines():
        if line.startswith("# HELP"):
            assert re.fullmatch(r"# HELP [a-z_]+ [A-Z0-9].+\.", line)
            continue
        if line.startswith("#"):
            family = re.fullmatch(r"# TYPE ([a-z_]+) (counter|gauge|histogram)", line)[1]
            continue
        found = re.fullmatch(r'(([a-z_]+)\{(?:[a-z_]+="[^"\\]*",?)*\}) (\S+)', line)
        assert found[2].startswith(family)
        assert found[1] not in samples
        samples[found[1]] = float(found[3])
    return samples


ENDED = "requests to the API server succeed again"
TROUBLE = {  # how it begins and ends, and what is logged
    "unreachable": (ApiServer.stop_listening, ApiServer.start_listening, ["Connection refused"]),
    "forbidden": (
        lambda server: server.tokens.update(sked="nobody"),
        lambda server: server.tokens.update(sked="sked"),
        ["daemonsets.apps is forbidden", "pods is forbidden", "schedexts.sked.schedkit.io is"],
    ),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_an_api_server_problem_is_logged_once_and_waited_out(world, server, caplog, trouble):
    begin, end, lines = TROUBLE[trouble]
    caplog.set_level(logging.INFO)
    begin(server)
    world.begin()
    eventually(lambda: sum(sked.METRICS.copy().values()), at_least(9))
    logged = sorted(caplog.messages)
    assert len(logged) == len(lines)
    assert all(words in line for words, line in zip(lines, logged))
    end(server)
    world.add()
    eventually(world.made)
    eventually(lambda: caplog.messages.count(ENDED), 1)
    assert sum(record.levelno > logging.INFO for record in caplog.records) == len(logged)


FAULTS = {  # how often each request is hit
    ("GET", "watch=true"): 3,
    ("GET", "limit="): 3,
    ("POST", "/daemonsets"): 1,
    ("PATCH", "/daemonsets"): 1,
    ("PATCH", "/status"): 1,
}


@pytest.mark.parametrize("action", ["lose", "truncate", "garbage", "hang", "stall", "error"])
def test_no_change_is_missed_after_a_fault(world, server, haste, caplog, action):
    for name in ("missing", "edited", "deleted"):
        world.add(name)
    world.start()
    eventually(lambda: len(images(server)), 3)
    server.stop_listening()
    world.add("new")
    world.edit("edited", sched=LAVD)
    world.remove("deleted")
    server.delete("daemonsets", "default", "missing")
    faults = [server.fault(*where, times, action) for where, times in FAULTS.items()]
    server.start_listening()
    eventually(lambda: images(server), {"missing": RUSTY, "edited": LAVD, "new": RUSTY})
    world.expect("RollingOut", "edited")
    assert all(fault.hits == fault.times for fault in faults)
    assert "unexpected error" not in caplog.text


BOOKMARK = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "2"}}}
CUT_OFF, GONE, NO_CRD = [
    {"type": "ERROR", "object": {"code": code, "message": "an error"}} for code in (500, 410, 404)
]


def page(*names: str, more: str = "") -> dict:
    """A page of a list of pods with these names."""
    items = [merge(kubelet_pod({}), {"metadata": {"name": name}}) for name in names]
    return {"metadata": {"resourceVersion": "1", "continue": more}, "items": items}


def test_a_quiet_watch_resumes_without_a_new_list(world, server):
    server.bookmark_seconds = 0.1
    world.set("WATCH_SECONDS", 1)
    world.start()
    resumed = ["list schedexts", "watch schedexts", "watch schedexts"]
    eventually(lambda: [d for d in server.deeds() if d.endswith(" schedexts")][:3], resumed)


def reflect(
    mocker: Any, lists: list, watch: list[dict], seconds: float = 50
) -> tuple[sked.Pods, list[float]]:
    """A reflector that gets these answers to lists, and watches like this one; and its pauses."""
    operator = mocker.MagicMock()
    clock = mocker.patch.object(sked, "monotonic", return_value=0.0)

    def follow(*_, **__):
        clock.return_value += seconds
        return (event for event in watch)

    operator.stop.is_set.side_effect = [False] * len(lists) + [True]
    operator.api.request.side_effect = lists
    operator.api.watch.side_effect = follow
    pods = sked.Pods(operator, "")
    pods.run()
    return pods, [call.args[0] for call in operator.stop.wait.call_args_list]


@pytest.mark.parametrize(
    "watch, versions, is_fault",
    [
        pytest.param([BOOKMARK], "122", False, id="resumed after its last event"),
        pytest.param([], "111", False, id="silent: the server may have been restored from backup"),
        pytest.param([BOOKMARK, CUT_OFF], "111", True, id="failed"),
        pytest.param([BOOKMARK, GONE], "111", False, id="its version is too old"),
        pytest.param([BOOKMARK, NO_CRD], "111", False, id="the CRD may be gone"),
    ],
)
def test_a_watch_resumes_where_it_ended_unless_it_was_silent_or_failed(
    mocker, watch, versions, is_fault
):
    operator = reflect(mocker, [page() for _ in range(3)], watch)[0].operator
    assert operator.api.request.call_count == versions.count("1")  # a list
    watched = [call.kwargs["resourceVersion"] for call in operator.api.watch.call_args_list]
    assert watched == list(versions)
    assert operator.faults.report.called is is_fault


def test_lists_are_paged_and_start_over_when_a_page_expires(mocker):
    pages = [page("a", more="2nd"), page("b", more="3rd"), page("c")]
    pods, _ = reflect(mocker, [copy(pages[0]), sked.ApiError(410, "expired"), *pages], [BOOKMARK])
    assert [name for _, name in pods.objects] == ["a", "b", "c"]
    asked = [call.kwargs for call in pods.operator.api.request.call_args_list]
    assert [query.get("continue") for query in asked] == [None, "2nd", None, "2nd", "3rd"]
    assert {query["limit"] for query in asked} == {sked.PAGE_ITEMS}


@pytest.mark.parametrize("status, names", [(500, ["a"]), (404, [])])
def test_the_cache_is_emptied_when_the_crd_is_gone_but_not_when_a_list_fails(mocker, status, names):
    answers = [page("a"), sked.ApiError(status, "no")]
    pods, _ = reflect(mocker, answers, [NO_CRD])
    assert [name for _, name in pods.objects] == names
    assert pods.operator.queue.add.call_count == 2 - len(names)
    (fault,) = pods.operator.faults.report.call_args_list
    assert ("install the CRD with" in str(fault)) is (status == 404)


def test_sked_reconnects_within_ten_seconds_of_any_outage(mocker):
    down = sked.ApiError(0, "down")
    _, found = reflect(mocker, [*[down] * 9, page()] * 6, [CUT_OFF])
    assert 5 < max(found) <= 8 >= sked.backoff(9999, 8)
    assert len(found) == 6 * 9  # a watch that lasted is opened again at once
    assert max(found[::9]) <= 1
    assert max(found[1::9]) <= 2


@pytest.mark.parametrize("events", [[], [CUT_OFF], [{"a": "bug"}]])
def test_watches_that_end_at_once_are_opened_less_and_less_often(mocker, caplog, events):
    _, found = reflect(mocker, [page()] * 9, events, 5)
    assert found[0] <= 1 and found[-1] > 5
    assert ("unexpected error" in caplog.text) is (events == [{"a": "bug"}])


def test_a_claim_is_there_at_every_moment_while_its_schedext_changes(mocker):
    """A pass that missed it would put another scheduler on its nodes."""

    class NeverEmpty(dict):
        pop = mocker.Mock(side_effect=AssertionError("a worker may look at the claims now"))

    schedexts = sked.SchedExts(mocker.Mock(), "")
    schedexts.claims = NeverEmpty()
    for changes in ({}, {"status": {"nodes": {}}}, {"spec": {"nodeSelector": {"a": "b"}}}, LATER):
        schedexts.store({("tools", "scx-rusty"): merge(given(), changes)})
    assert schedexts.claims


def test_a_new_list_of_what_a_watch_has_brought_queues_nothing(mocker):
    operator = mocker.Mock()
    pods, obj = sked.Pods(operator, ""), kubelet_pod(up(60))
    for _ in range(2):
        pods.store({("tools", "p"): pods.keep(copy(obj))})
    operator.queue.add.assert_called_once()


def test_caches_keep_who_changed_an_object_but_not_which_fields():
    entry = {"manager": "helm", "time": "2026-01-01T00:00:00Z"}
    meta = {"name": "x", "managedFields": [entry | {"fieldsV1": {"f:spec": {}}}]}
    obj = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": meta, "status": {"a": 1}}
    kept = {"metadata": {"name": "x", "managedFields": [entry]}, "spec": {}, "status": {"a": 1}}
    assert sked.trimmed(copy(obj)) == kept


# ---------------------------------------------------------------- the queue

ONE = ("default", "one")


def test_a_key_is_queued_once_for_the_earliest_requested_time(mocker):
    clock = mocker.patch.object(sked, "monotonic")
    clock.return_value = 100.0
    work = sked.WorkQueue()
    for after in (30, 7, 9):
        work.add(ONE, after)
    assert (work.next(), work.depth()) == ((ONE, 7.0), 0)
    clock.return_value = 107.5
    assert (work.depth(), work.get(mocker.Mock()), work.depth()) == (1, ONE, 0)
    work.succeeded(ONE, math.inf)
    clock.return_value = 200.0
    assert work.next() == (None, math.inf)


def test_a_key_goes_to_one_worker_at_a_time_and_returns_if_it_was_added_meanwhile(mocker):
    work = sked.WorkQueue()
    work.add(ONE)
    assert work.get(mocker.Mock()) == ONE
    work.add(ONE)
    assert work.next() == (None, math.inf)
    work.succeeded(ONE, 60)
    assert work.next()[1] <= 0


def test_a_worker_that_takes_a_key_wakes_another_one_for_the_next(monkeypatch):
    monkeypatch.setattr(sked, "BEAT_SECONDS", 3600)  # a worker that is not woken waits so long
    work = sked.WorkQueue()
    waiting, taken = [], []
    for _ in range(2):
        take = lambda: taken.append(work.get(lambda: waiting.append(1)))  # noqa: E731
        threading.Thread(target=take, daemon=True).start()
    eventually(lambda: len(waiting), 2)
    with work.condition:  # the other wake-up was lost on a worker that had stopped waiting
        work.due.update({("a", "a"): 0.0, ("b", "b"): 0.0})
        work.condition.notify()
    eventually(lambda: sorted(taken), [("a", "a"), ("b", "b")])


def test_a_closed_queue_waits_for_the_work_under_way_and_takes_no_more(mocker):
    work = sked.WorkQueue()
    work.add(ONE)
    assert work.get(mocker.Mock()) == ONE
    assert not work.close(0.01)
    work.add(("default", "two"))
    assert (work.depth(), work.get(mocker.Mock())) == (0, None)
    work.succeeded(ONE, 0)
    assert (work.depth(), work.close(0.01)) == (0, True)


def waits_after(mocker: Any, outcomes: list) -> list[float]:
    """How long a key waits after each of these outcomes of reconcile in a row."""
    mocker.patch.object(sked.random, "uniform", return_value=1.0)
    operator = sked.Operator(mocker.Mock())
    mocker.patch.object(operator, "reconcile", side_effect=outcomes)
    add = mocker.patch.object(operator.queue, "add")
    for _ in outcomes:
        operator.queue.busy.add(ONE)
        operator.process(ONE)
    return [call.args[1] for call in add.call_args_list]


@pytest.mark.parametrize(
    "status, longest", [(500, 60), (0, 8), (502, 8), (503, 8), (504, 8), ("bug", 300)]
)
def test_a_failing_key_backs_off_exponentially_until_it_succeeds(mocker, status, longest):
    bug = ValueError("bug")
    outcomes = [bug if status == "bug" else sked.ApiError(status, "no")] * 10 + [math.inf, bug]
    doubling = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    expected = [min(wait, longest) for wait in doubling] + [math.inf, 1]
    assert waits_after(mocker, outcomes) == expected


def test_another_kind_of_failure_starts_its_back_off_afresh(mocker):
    down, refused = sked.ApiError(0, "down"), sked.ApiError(500, "no")
    assert waits_after(mocker, [down] * 9 + [refused] * 3 + [down]) == [
        *(1, 2, 4, 8, 8, 8, 8, 8, 8),
        *(1, 2, 4),
        1,
    ]


@pytest.mark.parametrize("status", [404, 409])
def test_a_cache_that_is_behind_is_retried_at_once_but_only_once(mocker, status):
    behind = sked.ApiError(status, "no")
    assert waits_after(mocker, [behind] * 4 + [5.0, behind]) == [0, 2, 4, 8, 5, 0]


def messages_after(mocker: Any, caplog: Any, outcomes: list) -> list[str]:
    """What sked has logged after these outcomes of reconcile in a row."""
    caplog.set_level("INFO")
    waits_after(mocker, outcomes)
    return caplog.messages


@pytest.mark.parametrize("status", [500, 403, 404, 409])
def test_a_failure_is_logged_once_and_only_if_it_does_not_pass_soon(mocker, caplog, status):
    failure = sked.ApiError(status, "no")
    assert messages_after(mocker, caplog, [failure] * 4) == []
    caplog.clear()
    logged = messages_after(mocker, caplog, [failure] * 12)
    assert logged == ["default/one: no; trying again"]


def test_a_bug_in_reconcile_is_logged_with_its_traceback(mocker, caplog):
    logged = messages_after(mocker, caplog, [ValueError("a bug")])
    assert logged == ["default/one: unexpected error"]
    assert "ValueError: a bug" in caplog.text


def test_an_outage_is_logged_at_once_and_its_end_after_the_first_success(mocker, caplog):
    down, refusal = sked.ApiError(0, "down"), sked.ApiError(403, "forbidden")
    outcomes = [down, down, refusal, refusal, math.inf, math.inf, down, math.inf]
    assert messages_after(mocker, caplog, outcomes) == ["down; trying again", ENDED] * 2


def test_the_end_of_faults_is_logged_once_when_the_last_one_is_over(caplog):
    caplog.set_level("INFO")
    faults = sked.Faults()
    for who, message in [
        ("pods", "down: refused"),
        ("lease", "down: aborted"),
        ("pods", "forbidden"),
    ]:
        faults.report(who, message)
    logged = ["down: refused; trying again", "forbidden; trying again"]
    for who in ("daemonsets", "pods"):
        faults.clear(who)
    assert caplog.messages == logged
    for who in ("lease", "lease"):
        faults.clear(who)
    assert caplog.messages == [*logged, ENDED]


# ---------------------------------------------------------------- reconcile: create or patch


@pytest.mark.parametrize("world", ["server", "real"], indirect=True)
def test_the_daemonset_follows_its_schedext_from_creation_to_deletion(world, caplog):
    caplog.set_level("INFO")
    world.start()
    world.add(args=["-v"], nodeSelector={"a": "1", "b": "2"})
    eventually(world.made)
    world.edit(sched=LAVD, args=None, nodeSelector={"b": None})
    eventually(world.image, LAVD)
    pod = pod_spec(world.made())
    assert pod["nodeSelector"] == {"a": "1"}
    assert "args" not in pod["containers"][0]
    world.remove()
    eventually(world.made, nothing)
    eventually(lambda: caplog.messages, contains(f"{world.ns}/x: deleted"))


@pytest.mark.parametrize("world", ["real"], indirect=True)
def test_every_field_is_written_once_and_an_edit_is_undone(world):
    world.deploy("Suspended", **ALL_FIELDS)
    before = world.made()
    assert (before["metadata"]["generation"], world.is_stamped()) == (1, True)
    world.drift(in_template(hostPID=None, tolerations=None))
    eventually(lambda: world.made()["spec"], before["spec"])
    eventually(world.is_stamped)
    assert world.made()["metadata"]["generation"] == 3


def test_a_daemonset_without_a_stamp_is_taken_over_and_restarts_nobody(world, server, kubelets):
    """Its spec says the same in another spelling."""
    kubelets.add_node("a")
    server.create(daemonset("x", world.ns, world.add()))
    before = eventually(lambda: uids(kubelets))
    world.start()
    world.expect("AllReady")
    assert world.written().count("patch daemonsets") == 1
    assert uids(kubelets) == before
    assert server.list("events") == []
    assert world.restart() == []


def test_a_daemonset_on_its_way_out_is_waited_for_and_then_made_again(world, server, fleet):
    fleet.stop_seconds = math.inf  # the pods do not end, and the DaemonSet waits for them
    old = world.made()["metadata"]["uid"]
    server.delete("daemonsets", world.ns, "x", "Foreground")
    assert "for the old DaemonSet x to be deleted" in world.expect("RollingOut")["message"]
    world.edit(sched=LAVD)
    world.expect("RollingOut")
    assert (world.image(), world.made()["metadata"]["uid"]) == (RUSTY, old)
    fleet.stop_seconds = 0.0
    eventually(world.image, LAVD)
    assert world.made()["metadata"]["uid"] != old


def test_a_schedext_that_is_being_deleted_is_left_alone(mocker):
    operator = sked.Operator(mocker.Mock())
    operator.schedexts.objects[ONE] = merge(given(), {"metadata": {"deletionTimestamp": "now"}})
    assert operator.reconcile(ONE) == math.inf
    assert operator.api.mock_calls == []


def known(world: World) -> dict | None:
    """What sked knows of x."""
    return world.operator.schedexts.objects.get((world.ns, "x"))


def admission(deeds: str, change: Callable) -> Callable:
    """A webhook that changes the objects of deeds such as 'create pods'."""

    def webhook(request: Request, obj: dict) -> dict:
        return change(obj) if re.fullmatch(deeds, request.deed) else obj

    return webhook


def refuse(words: str, why: str) -> Callable:
    """Refuses objects that contain these words."""

    def change(obj: dict) -> dict:
        if words in str(obj):
            raise Refusal(403, why)
        return obj

    return change


@cases(
    "refusals, seconds, why, is_reported",
    """
    a bad request: {refusals: [400], is_reported: true}
    an invalid DaemonSet: {refusals: [422], is_reported: true}
    forbidden for a moment: {refusals: [403, 403], seconds: 9}
    forbidden: {refusals: [403, 403], is_reported: true}
    a failing webhook: {refusals: [500, 500], is_reported: true}
    too many requests: {refusals: [429, 429]}
    the name is taken for a moment: {refusals: [409, 409]}
    the namespace is not there: {refusals: [404, 404]}
    the API server is down: {refusals: [0, 502, 503, 504]}
    the namespace is being deleted:
      refusals: [403, 403]
      why: unable to create new content in namespace x because it is being terminated
    """,
    seconds=10,
    why="no",
    is_reported=False,
)
def test_a_refusal_is_reported_at_once_only_if_waiting_cannot_help(
    mocker, refusals, seconds, why, is_reported
):
    clock = mocker.patch.object(sked, "monotonic", return_value=100.0)
    operator = sked.Operator(mocker.Mock())
    operator.memories[ONE] = sked.Memory(given())
    *first, last = [sked.ApiError(status, why) for status in refusals]
    for refusal in first:
        operator.check_refusal(ONE, refusal)
    clock.return_value += seconds
    reported = pytest.raises(sked.Blocked, match="cannot apply the DaemonSet: no")
    with reported if is_reported else contextlib.nullcontext():
        operator.check_refusal(ONE, last)


def test_a_refusal_that_lasts_is_rejected_with_one_event_until_it_is_over(world, server):
    world.set("PATIENCE_SECONDS", 0)
    server.fault("POST", "/daemonsets", 3, status=403)
    world.deploy("RollingOut")
    assert "Rejected" in world.reasons()
    assert condition_of(world.get(), "Stalled") == {}
    events = [event["reason"] for event in server.list("events")]
    assert events == ["Rejected"]  # the late creation is not reported as drift


def test_a_restart_on_finished_work_writes_nothing(world, server, fleet):
    world.set("PATIENCE_SECONDS", 1)
    world.add("parks-x-and-fails", "ghcr.io/x/y:nopull", nodeSelector=A)
    server.webhook = admission("create daemonsets", refuse("'refused'", "exceeded quota"))
    world.add("refused", nodeSelector={"no": "where"})
    server.create(unlabelled_daemonset("taken", world.ns))
    world.add("taken", nodeSelector={"not": "here"})
    world.expect("NodesFailing", "parks-x-and-fails")
    world.expect("Rejected", "refused")
    world.expect("NameTaken", "taken")
    eventually(lambda: stamp_on(world.made())["parked"])
    world.expect("AllReady")
    assert world.restart() == []
    since = time.time()
    eventually(lambda: {r.name for r in server.requests if r.time > since}, contains("refused"))
    assert world.written(since) == []


def test_a_new_schedext_takes_two_writes_without_field_validation(world, server):
    world.deploy()
    eventually(world.is_idle)
    assert world.written() == ["create daemonsets", "patch schedexts/status"]
    assert {r.query.get("fieldValidation") for r in server.writes()} == {"Ignore"}


def test_sked_can_be_limited_to_one_namespace(server, launch):
    server.create(schedext("out"))
    server.create(schedext("in", namespace="tools"))
    operator = launch("--namespace=tools")
    eventually(lambda: condition_of(server.get("schedexts", "tools", "in"), "Ready"))
    assert {r.namespace for r in server.requests if r.user == "sked"} == {"tools"}
    assert f" watches SchedExts in tools at http://127.0.0.1:{server.port}\n" in operator.said


def test_a_conflict_is_answered_by_a_fresh_look_at_once(world, server, mocker):
    world.deploy()
    eventually(world.is_idle)
    world.set("backoff", lambda failures, most: most)  # any other retry comes after minutes
    write = world.operator.write
    edits = [in_template(hostPID=True)]  # made just before sked's next write

    def write_late(method: str, path: str, *rest: Any) -> dict:
        if "/daemonsets/" in path and edits:
            world.drift(edits.pop())
        return write(method, path, *rest)

    mocker.patch.object(world.operator, "write", side_effect=write_late)
    world.drift({"metadata": {"labels": {"managed-by": None}}})  # the watch shows no more of it
    fields = "spec.template.spec.hostPID, metadata.labels.managed-by"
    eventually(lambda: drift_events(server), [f"admin changed {fields}; sked has reverted it"])
    assert [request.status for request in server.writes()].count(409) == 1
    assert "hostPID" not in pod_spec(world.made())
    assert world.made()["metadata"]["labels"] == {"managed-by": "sked-controller"}


def test_an_invalid_spec_admitted_by_a_lax_schema_blocks_no_other_schedext(world, server):
    server.resources["schedexts"] = schedexts()._replace(schema={})
    bad = [None, "text", {}, {"sched": "x", "nodeSelector": ["a"]}, {"sched": "x", "hostPaths": 5}]
    for number, spec in enumerate(bad):
        server.create(schedext(f"y-{number}") | {"spec": spec})
    world.deploy(nodeSelector=A)  # more specific than those, which may be older
    for number in range(len(bad)):
        world.expect("Rejected", f"y-{number}")


# ---------------------------------------------------------------- reconcile: drift and fights


def events_of(server: ApiServer) -> list[tuple[str, str, str]]:
    """Type, SchedExt and reason of every event, sorted."""
    events = server.list("events")
    return sorted((e["type"], e["involvedObject"]["name"], e["reason"]) for e in events)


def drift_events(server: ApiServer) -> list[str]:
    events = server.list("events")
    return sorted(event["message"] for event in events if event["reason"] == "DriftUndone")


QUICK_EDITS = {  # by the field that each of them changes
    "metadata.labels.managed-by": {"metadata": {"labels": {"managed-by": None}}},
    "spec.minReadySeconds": {"spec": {"minReadySeconds": 7}},
    "spec.template.spec.hostPID": in_template(hostPID=True),
    "spec.template.spec.nodeSelector": in_template(nodeSelector={"a": "b"}),
    f"metadata.annotations.{STAMP_ANNOTATION}": {
        "metadata": {"annotations": {STAMP_ANNOTATION: None}}
    },
}


def test_edits_are_undone_at_once_each_with_an_event_that_says_what_and_who(
    world, server, fleet, caplog
):
    before = world.made()["spec"]
    for number, edit in enumerate(QUICK_EDITS.values(), 1):
        world.drift(edit)
        eventually(lambda: len(drift_events(server)), number)
        eventually(lambda: world.made()["spec"], before)
    said = [f"admin changed {path}; sked has reverted it" for path in QUICK_EDITS]
    assert drift_events(server) == sorted(said)
    assert stamp_on(world.made())["generation"] == world.made()["metadata"]["generation"]
    world.expect("AllReady")
    assert "backing off" not in caplog.text + str(world.conditions())


def test_a_stamp_that_could_not_be_corrected_at_once_is_corrected_later(world, server, mocker):
    world.deploy()
    eventually(world.is_idle)
    write, paths = world.operator.write, []

    def lose(method: str, path: str, *rest: Any) -> dict:
        paths.extend([path] if "/daemonsets/" in path else [])
        if paths[1:] == [path]:  # it follows the repair
            raise sked.ApiError(0, "no answer")
        return write(method, path, *rest)

    mocker.patch.object(world.operator, "write", side_effect=lose)
    world.drift(in_template(hostPID=True))
    eventually(lambda: len(paths), at_least(3))
    eventually(world.is_idle)
    assert world.is_stamped()
    assert len(drift_events(server)) == 1


def test_an_edit_while_sked_was_down_is_undone_and_told_although_a_pool_came_meanwhile(
    world, server, fleet
):
    world.stop()
    world.drift(in_template(containers=[SCHEDULER | {"image": "evil"}]))
    world.add("pool", nodeSelector=A)
    world.start()
    said = "admin changed spec.template.spec.containers.scx.image; sked has reverted it"
    eventually(lambda: drift_events(server), [said])
    eventually(lambda: "affinity" in pod_spec(world.made()))
    assert world.image() == RUSTY


def test_an_edit_that_also_ends_parking_is_told(world, server, fleet):
    world.add("pool", nodeSelector=A)
    eventually(lambda: stamp_on(world.made())["parked"])
    world.expect("AllReady")
    world.stop()
    edit = in_template(containers=[SCHEDULER | {"image": "evil"}])
    world.drift(merge(edit, {"spec": {"updateStrategy": {"type": "RollingUpdate"}}}))
    eventually(lambda: "evil" in running(fleet).values())
    world.start()
    said = "admin changed spec.template.spec.containers.scx.image; sked has reverted it"
    eventually(lambda: drift_events(server), [said])
    eventually(lambda: running(fleet), {"b": RUSTY, "c": RUSTY})
    world.expect("AllReady")


@pytest.mark.parametrize("was_down", [False, True], ids=["up", "down"])
def test_a_deleted_daemonset_is_created_again_and_the_event_says_so(world, server, fleet, was_down):
    eventually(world.is_idle)
    old = world.made()["metadata"]["uid"]
    if was_down:
        world.stop()
    server.delete("daemonsets", world.ns, "x")
    if was_down:
        world.start()
    said = "the DaemonSet was deleted; sked has created it again"
    eventually(lambda: drift_events(server), [said])
    assert world.made()["metadata"]["uid"] != old


def test_a_fight_is_reported_paced_and_never_given_up_until_something_new_is_wanted(world, server):
    world.set("QUIET_SECONDS", 60.0)  # however slow this machine is
    world.deploy()
    before = world.made()["spec"]
    edit = in_template(hostPID=True)
    eventually(world.is_idle)
    world.set("backoff", lambda failures, most: most)  # a pause takes minutes
    for _ in range(7):
        world.drift(edit)
        eventually(lambda: world.made()["spec"], before)
        eventually(world.is_stamped)
    eventually(world.is_idle)  # as long as nobody edits it again, the pause is not reported
    assert "backing off" not in condition_of(world.get(), "Ready")["message"]
    world.drift(edit)
    said = "admin changed spec.template.spec.hostPID"
    status = f"sked is backing off; the last time, {said}; sked has reverted it"
    eventually(lambda: world.expect("RollingOut")["message"], contains(status))

    world.edit(sched=LAVD)
    eventually(world.image, LAVD)
    assert "hostPID" not in pod_spec(world.made())
    world.drift(edit)  # the fight is over, so this is undone at once
    told = [f"{said}; sked has reverted it"] * 7
    told.append(f"{told[0]} 7 times and is backing off")
    eventually(lambda: drift_events(server), told)


def test_repairs_are_paced_after_six_and_the_fight_is_over_after_a_quiet_minute(mocker):
    clock = mocker.patch.object(sked, "monotonic", return_value=100.0)
    mocker.patch.object(sked, "backoff", lambda failures, most: 10.0 * failures)
    memory = sked.Memory(given())
    for _ in range(7):
        memory.check_pause("")
        memory.count_repair("an edit")
    for seconds in (10.0, 20.0, 30.0):
        with pytest.raises(sked.Blocked, match="the last time, an edit") as pause:
            memory.check_pause("")
        assert pause.value.look_again == seconds
        clock.return_value += seconds + 59.0  # not quiet for long enough
        memory.check_pause("")
        memory.count_repair("an edit")
    clock.return_value += 40.0 + 61.0
    for _ in range(7):
        memory.check_pause("")
        memory.count_repair("an edit")
    with pytest.raises(sked.Blocked):
        memory.check_pause("")
    memory.wrote_something_new()
    memory.check_pause("")


def test_a_lasting_refusal_is_retried_after_as_long_as_it_has_lasted_but_within_a_minute(mocker):
    clock = mocker.patch.object(sked, "monotonic", return_value=100.0)
    operator = sked.Operator(mocker.Mock())
    operator.memories[ONE] = sked.Memory(given())
    for clock.return_value, pause in ((100.0, 1), (103.0, 3), (115.0, 15), (999.0, 60)):
        with pytest.raises(sked.Blocked, match="no pods today") as blocked:
            operator.check_refusal(ONE, sked.ApiError(422, "no pods today"))
        assert (blocked.value.reason, blocked.value.look_again) == ("Rejected", pause)


@pytest.mark.parametrize("how", ["write", "look", "outage"])
def test_a_refusal_has_not_lasted_if_something_else_came_in_between(mocker, how):
    clock = mocker.patch.object(sked, "monotonic", return_value=100.0)
    operator = sked.Operator(mocker.Mock())
    memory = operator.memories[ONE] = sked.Memory(given())
    assert memory.refused() == 0
    clock.return_value = 999.0
    if how == "write":
        memory.wrote_daemonset(STORED, sked.NO_STAMP)
    elif how == "look":
        memory.saw_as_wanted(STORED)
    else:
        mocker.patch.object(operator, "reconcile", side_effect=sked.ApiError(503, "down"))
        operator.queue.add(ONE)
        operator.process(operator.queue.get(mocker.Mock()))
    assert memory.refused() == 0


def test_a_refusal_that_is_over_never_reaches_the_status(world, server):
    """Not even if the status could not be written while it lasted."""
    world.set("PATIENCE_SECONDS", 0)
    world.deploy()
    eventually(world.is_idle)
    world.set("BLOCKED_SECONDS", 600)  # a pause may last so long
    down = server.fault("PATCH", "schedexts|daemonsets", None, status=500)
    world.edit(sched=LAVD)
    eventually(
        lambda: {r.what for r in server.writes() if r.status == 500},
        {"daemonsets", "schedexts/status"},
    )
    down.clear()
    eventually(world.image, LAVD)
    world.expect("RollingOut")
    assert "Rejected" not in world.reasons()


def test_a_generation_that_was_foreseen_too_high_hides_no_edit():
    """The answer, or the write that corrects the stamp, may be a moment late."""
    memory = sked.Memory(given())
    answer = stamped(STORED, generation=2)
    memory.wrote_daemonset(answer, sked.stamp_of(answer))
    edited = merge(answer, {"metadata": {"generation": 2}})
    assert memory.stamp_to_trust(edited).generation == 1


def test_the_stamp_of_a_daemonset_that_was_found_as_it_should_be_is_known_if_it_is_lost(mocker):
    key = ("tools", "scx-rusty")
    operator = sked.Operator(mocker.MagicMock())
    operator.schedexts.objects[key] = merge(given(), {"metadata": {"resourceVersion": "1"}})
    operator.daemonsets.objects[key] = stamped(STORED)
    operator.reconcile(key)
    without = noted(stamped(STORED), None)
    assert operator.memories[key].stamp_to_trust(without) == sked.stamp_of(stamped(STORED))


def test_after_a_lost_answer_an_edit_is_not_taken_for_our_own_write(mocker):
    """Our write set a field to its default, so it did not raise the generation; the edit did."""
    operator = sked.Operator(mocker.Mock())
    have, target = stamped(STORED), stamped(STORED, wish="new", generation=2)
    obj = given() | {"status": {}}
    memory = operator.memories[ONE] = sked.Memory(obj)
    memory.wrote_daemonset(have, sked.stamp_of(have))
    operator.api.request.side_effect = sked.ApiError(0, "no answer")
    with pytest.raises(sked.ApiError, match="no answer"):
        seen = sked.Observed(obj, have, sked.stamp_of(have), [], [])
        operator.write_daemonset(ONE, seen, target)
    edited = merge(target, LATER)
    assert memory.is_ahead_of(edited)  # so sked asks the API server
    assert memory.stamp_to_trust(edited).generation != 2
    assert memory.stamp_to_trust(have) == sked.stamp_of(have)  # if the write never arrived


def test_what_another_sked_has_stamped_is_believed():
    memory = sked.Memory(given())
    memory.wrote_daemonset(stamped(STORED), sked.stamp_of(stamped(STORED)))
    theirs = merge(stamped(STORED, wish="other", generation=2), LATER)
    assert memory.stamp_to_trust(theirs) == sked.stamp_of(theirs)


@pytest.mark.parametrize("was_down", [False, True], ids=["up", "down"])
def test_a_daemonset_that_is_replaced_by_an_edited_copy_is_told_of(world, server, fleet, was_down):
    """As by kubectl replace --force, so our stamp is on it."""
    eventually(world.is_idle)
    before = world.made()
    edited = merge(before, in_template(hostPID=True))
    for name in ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"):
        edited["metadata"].pop(name, None)
    if was_down:
        world.stop()
    server.delete("daemonsets", world.ns, "x")
    server.create(edited)
    if was_down:
        world.start()
    said = "admin changed spec.template.spec.hostPID; sked has reverted it"
    eventually(lambda: drift_events(server), [said])
    assert world.made()["spec"] == before["spec"]


def test_a_schedext_that_is_recreated_quickly_is_no_drift(world, server):
    world.deploy()
    # so that sked sees the new one in place of the old
    silence = server.fault("GET", "schedexts.*watch=true", None, "hang")
    server.drop_connections()
    eventually(lambda: silence.hits)
    world.remove()
    eventually(world.made, nothing)
    uid = world.add()
    silence.clear()
    eventually(lambda: dig(world.made(), "metadata.ownerReferences.0.uid"), uid)
    world.expect("RollingOut")
    assert drift_events(server) == []


def test_a_lost_answer_and_a_revert_by_the_user_blame_nobody(world, server, fleet):
    server.fault("PATCH", "/daemonsets/", action="lose")
    down = server.fault("GET", "/daemonsets/x", None, status=503)
    world.edit(sched=LAVD)
    eventually(lambda: down.hits)
    assert world.image() == LAVD
    world.edit(sched=RUSTY)
    eventually(lambda: known(world)["spec"]["sched"], RUSTY)
    down.clear()
    eventually(world.image, RUSTY)
    world.expect("AllReady")
    assert server.list("events") == []


# ---------------------------------------------------------------- reconcile: admission


def to_mirror(obj: dict) -> dict:
    """What a policy makes of a DaemonSet: its images come from a mirror."""
    text = json.dumps(obj).replace('"image": "ghcr.io/', '"image": "mirror/')
    return json.loads(text)


WRITES = "(create|update|patch) daemonsets"  # what a policy applies to


def test_a_policy_that_rewrites_images_is_accepted_and_restarts_nobody(world, server, kubelets):
    server.webhook = admission(WRITES, to_mirror)
    for node in "abc":
        kubelets.add_node(node, pool=node)
    world.deploy("AllReady")
    before = uids(kubelets)
    assert world.written().count("patch daemonsets") == 0
    assert world.restart() == []

    world.stop()
    world.add("pool", LAVD, nodeSelector=A)
    world.start()
    eventually(lambda: uids(kubelets), {node: before[node] for node in "bc"})
    world.expect("AllReady", "pool")

    world.edit(sched=LAVD)
    world.expect("AllReady")
    assert set(running(kubelets).values()) == {LAVD.replace("ghcr.io", "mirror")}
    assert drift_events(server) == []
    world.drift(in_template(hostPID=True))
    said = "admin changed spec.template.spec.hostPID; sked has reverted it"
    eventually(lambda: drift_events(server), [said])


def test_a_stamp_that_admission_strips_makes_no_busy_loop_and_one_log_line(
    world, server, fleet, caplog
):
    def strip(obj: dict) -> dict:
        return merge(obj, {"metadata": {"annotations": {STAMP_ANNOTATION: None}}})

    server.webhook = admission(WRITES, strip)
    world.edit(sched=LAVD)
    world.expect("AllReady")
    world.drift(in_template(hostPID=True))
    eventually(lambda: drift_events(server))
    eventually(world.is_idle)
    assert "hostPID" not in pod_spec(world.made())
    # the wish, the repair and, unless a new status is faster, its stamp
    assert world.written().count("patch daemonsets") <= 3
    assert caplog.text.count("something removes the annotation") == 1


def test_a_label_that_admission_strips_makes_no_busy_loop_and_is_reported(world, server):
    world.deploy()
    eventually(world.is_idle)
    server.webhook = admission(
        "patch daemonsets", lambda obj: merge(obj, {"metadata": {"labels": {"managed-by": None}}})
    )
    world.set("backoff", lambda failures, most: most)  # a pause takes minutes
    world.drift({"metadata": {"labels": {"a": "b"}}})
    eventually(lambda: world.expect("RollingOut")["message"], contains("sked is backing off"))
    assert world.written().count("patch daemonsets") == 7


# ---------------------------------------------------------------- status on a cluster


def test_a_crash_loop_is_one_steady_failure_until_it_is_fixed(world, kubelets):
    kubelets.crash_seconds = (0.2, 0.15, 0.15)
    kubelets.add_node("n")
    world.set("SETTLE_SECONDS", 2.0)
    world.start()
    world.add(sched="ghcr.io/x/y:crash", terminationMessagePolicy="FallbackToLogsOnError")
    eventually(lambda: str(world.get().get("status")), contains("2 restarts"))
    assert world.reasons() in (["NodesFailing"], ["RollingOut", "NodesFailing"])
    times = {condition["lastTransitionTime"] for condition in world.conditions()}
    world.edit(sched=RUSTY)
    ready = world.expect("AllReady")
    assert len(times) == 1 and ready["lastTransitionTime"] not in times
    assert world.get()["status"]["failures"] == []


def test_how_long_the_counts_have_been_the_same_starts_afresh_with_every_change(mocker):
    """A restart of sked does not hide a failure."""
    clock = mocker.patch.object(sked, "monotonic", return_value=100.0)
    for reason, known in (("RollingOut", 0.0), ("NodesFailing", 10.0)):
        ready = {"type": "Ready", "reason": reason, "message": "it fails"}
        memory = sked.Memory(given() | {"status": {"conditions": [ready]}})
        assert memory.note_counts((1, 0, 0)) == known
        clock.return_value += 4.0
        assert memory.note_counts((1, 0, 0)) == known + 4.0
        assert memory.note_counts((2, 0, 0)) == 0.0
        clock.return_value += 4.0
        assert memory.note_counts((2, 0, 0)) == 4.0


def test_a_rollout_is_ready_when_it_is_complete(world, kubelets):
    for n in range(40):
        kubelets.add_node(f"n{n}")
    world.deploy("AllReady", updateStrategy={"rollingUpdate": {"maxUnavailable": 10}})
    world.edit(sched=LAVD)
    world.expect("AllReady")
    assert set(running(kubelets).values()) == {LAVD}
    assert world.nodes() == ready_on(40)


def test_the_status_is_written_at_most_once_a_second(mocker):
    clock = mocker.patch.object(sked, "monotonic", return_value=1000.0)
    operator = sked.Operator(mocker.Mock())
    operator.memories[ONE] = sked.Memory(given())
    patch = mocker.patch.object(operator, "patch")
    for seconds, writes, look_again in ((0.0, 1, math.inf), (0.75, 1, 0.25), (0.25, 2, math.inf)):
        clock.return_value += seconds
        seen = observed(["settled", "settled"])
        assert operator.update_status(ONE, seen, None) == look_again
        assert patch.call_count == writes


def test_each_problem_and_a_recovery_make_one_event_and_requested_changes_make_none(
    world, server, fleet
):
    world.edit(sched=LAVD)
    world.expect("AllReady")
    assert server.list("events") == []
    world.add("pool", nodeSelector={"pool": "none"})
    world.expect("NoNodes", "pool")
    world.edit(sched="ghcr.io/x/y:nopull")
    world.expect("NodesFailing")
    expected = [("Warning", "pool", "NoNodes"), ("Warning", "x", "NodesFailing")]
    eventually(lambda: events_of(server), expected)
    assert world.restart() == []
    world.edit(sched=RUSTY)
    world.expect("AllReady")
    eventually(lambda: events_of(server), [("Normal", "x", "AllReady"), *expected])
    world.edit(sched=LAVD)
    world.expect("AllReady")
    eventually(world.is_idle)
    assert events_of(server) == [("Normal", "x", "AllReady"), *expected]


EDITED = merge(stamped(STORED), LATER)


@pytest.mark.parametrize(
    "old, new, seconds",
    [
        pytest.param(None, stamped(STORED), 1.0, id="it is created"),
        pytest.param(stamped(STORED), None, 1.0, id="it is deleted"),
        pytest.param(stamped(STORED), merge(stamped(STORED), {"status": {}}), 1.0, id="counts"),
        pytest.param(stamped(STORED), EDITED, 0.0, id="an edit"),
        pytest.param(EDITED, merge(EDITED, {"status": {"a": 1}}), 1.0, id="counts after an edit"),
        pytest.param(
            stamped(STORED), merge(stamped(STORED, generation=2), LATER), 1.0, id="our own write"
        ),
    ],
)
def test_news_of_a_daemonset_is_gathered_for_a_second_but_for_an_edit(mocker, old, new, seconds):
    operator = mocker.Mock()
    sked.DaemonSets(operator, "").changed(old, new)
    operator.queue.add.assert_called_once_with(("tools", "scx-rusty"), seconds)


@cases(
    "statuses, events",
    """
    it flaps: {statuses: [NodesFailing a, RollingOut, NodesFailing a], events: [NodesFailing a]}
    it fails in another way:
      statuses: [NodesFailing a, RollingOut, NodesFailing b]
      events: [NodesFailing a, NodesFailing b]
    it recovers and fails again:
      statuses: [NodesFailing a, AllReady, NodesFailing a]
      events: [NodesFailing a, AllReady, NodesFailing a]
    it recovers after a restart of sked:
      statuses: [NodesFailing a, restart, RollingOut, NodesFailing a, AllReady]
      events: [NodesFailing a, AllReady]
    it is suspended and fails again:
      statuses: [NodesFailing a, Suspended, NodesFailing a]
      events: [NodesFailing a, NodesFailing a]
    """,
)
def test_an_event_tells_something_new(mocker, statuses, events):
    operator = sked.Operator(mocker.Mock())
    send_event = mocker.patch.object(operator, "send_event")
    schedext = given()
    operator.memories[ONE] = sked.Memory(schedext)
    for text in statuses:
        if text == "restart":
            operator.memories[ONE] = sked.Memory(schedext)
            continue
        reason, _, message = text.partition(" ")
        state = str(reason in ("AllReady", "Suspended"))
        ready = {"type": "Ready", "status": state, "reason": reason, "message": message}
        operator.report_status(ONE, schedext, {"conditions": [ready]})
        schedext |= {"status": {"conditions": [ready]}}
    told = [" ".join(call.args[2:]).strip() for call in send_event.call_args_list]
    assert told == events


def test_hanging_events_delay_nothing_else(world, server):
    hang = server.fault("POST", "/events", None, "hang")
    world.deploy()
    world.drift(in_template(hostPID=True))
    eventually(lambda: hang.hits)
    world.edit(sched=LAVD)
    eventually(world.image, LAVD, 20)  # less than REQUEST_SECONDS


# ---------------------------------------------------------------- node pools


@cases(
    "old, new, is_first_list, woken",
    """
    a pool appears: {new: {labels: pool=a}, woken: {it: 0, plain: 0, zone: 0}}
    a pool is deleted: {old: {labels: pool=a}, woken: {it: 0, plain: 1, zone: 1}}
    a pool is about to be deleted:
      old: {labels: pool=a}
      new: {labels: pool=a, generation: 2, leaving: true}
      woken: {it: 0, plain: 0, zone: 0}
    a pool gets other nodes:
      old: {labels: pool=a}
      new: {labels: pool=b, generation: 2}
      woken: {it: 0, plain: 0, zone: 0, b: 0}
    a pool is suspended:
      old: {labels: pool=a}
      new: {labels: pool=a, suspend: true, generation: 2}
      woken: {it: 0, plain: 0, zone: 0}
    a pool gets another image:
      old: {labels: pool=a}
      new: {labels: pool=a, sched: scx, generation: 2}
      woken: {it: 0}
    only its status changes:
      old: {labels: pool=a}
      new: {labels: pool=a, status: {nodes: {}}}
      woken: {it: 1}
    one that yields to the others appears: {new: {labels: "", created: "9"}, woken: {it: 0}}
    the first list: {new: {labels: pool=a}, is_first_list: true, woken: {it: 0}}
    """,
    old=None,
    new=None,
    is_first_list=False,
)
def test_a_change_wakes_only_those_that_yield_to_it(mocker, old, new, is_first_list, woken):
    """After a deletion with a delay: then the pods on those nodes may have ended."""

    def it(labels: str, created: str = "2", generation: int = 1, **more: Any) -> dict:
        name, status = more.pop("name", "it"), more.pop("status", {})
        obj = for_nodes(labels, name, created, **more) | {"status": status}
        return merge(obj, {"metadata": {"generation": generation}})

    others = {"plain": "", "zone": "zone=z", "b": "pool=b", "inner": "pool=a,zone=z"}
    operator = mocker.Mock()
    schedexts = sked.SchedExts(operator, "")
    before = [it(others[name], "3", name=name) for name in others] + ([it(**old)] if old else [])
    schedexts.store({sked.key_of(obj): obj for obj in before})
    if not is_first_list:
        schedexts.filled.set()
    operator.reset_mock()
    schedexts.store({("tools", "it"): new and it(**new)})
    added = [call.args for call in operator.queue.add.call_args_list]
    assert {name: after for (_, name), after in added} == woken


def test_of_two_schedexts_for_the_same_nodes_the_younger_waits_and_takes_over(world, server, fleet):
    before = uids(fleet)
    world.add("y", LAVD)
    message = world.expect("Conflict", "y")["message"]
    assert message.startswith("SchedExt default/x selects the same nodes and is older: delete one")
    conflict = ("Warning", "y", "Conflict")
    eventually(lambda: events_of(server), [conflict])
    assert world.restart() == []
    assert (uids(fleet), fleet.pods("y")) == (before, {})
    world.edit(suspend=True)  # off means off: the other one does not move in
    world.expect("Suspended")
    suspended = "SchedExt default/x, which is suspended, selects the same nodes"
    eventually(lambda: world.expect("Conflict", "y")["message"], contains(suspended))
    assert fleet.pods("y") == {}
    world.remove()
    world.expect("AllReady", "y")
    assert fleet.pods("y").keys() == {"a", "b", "c"}
    eventually(lambda: events_of(server), [("Normal", "y", "AllReady"), conflict])


def test_adding_changing_and_removing_a_pool_restarts_no_pod_on_other_nodes(world, server, fleet):
    first = uids(fleet)

    def placed():
        return "".join(sorted(fleet.pods("x"))), "".join(fleet.pods("pool", "tools"))

    server.create(schedext("pool", LAVD, "tools", nodeSelector=A))
    eventually(placed, ("bc", "a"))
    server.patch("schedexts", "tools", "pool", {"spec": {"nodeSelector": B}})
    eventually(placed, ("ac", "b"))
    eventually(world.nodes, ready_on(2))
    world.expect("AllReady")
    assert world.restart() == []
    server.delete("schedexts", "tools", "pool")
    eventually(placed, ("abc", ""))
    eventually(world.nodes, ready_on(3))
    assert uids(fleet)["c"] == first["c"]


# ---------------------------------------------------------------- lost nodes, hanging watches, bugs


def test_pods_of_a_deleted_daemonset_of_the_same_name_do_not_count(mocker):
    operator = sked.Operator(mocker.Mock())
    operator.memories[ONE] = sked.Memory(given())
    operator.daemonsets.objects[ONE] = STORED
    mine, former = pods_of(["settled", "crashing"])
    operator.pods.objects = {"a": mine, "b": former._replace(daemonset_uid="d-0")}
    assert operator.observe(ONE, given()).pods == [mine]


def test_pods_forbidden_by_policy_in_the_middle_of_a_rollout_are_reported(world, server, fleet):
    server.webhook = admission("create pods", refuse(LAVD, "violates PodSecurity"))
    world.edit(sched=LAVD)
    message = world.expect("NodesFailing")["message"]
    see = "see 'kubectl describe daemonset -n default x'"
    assert message == f"failing on 1 of 3 nodes; 1 without a pod: {see}"
    assert world.nodes()["failing"] == 1
    eventually(lambda: [event["reason"] for event in server.list("events")], ["NodesFailing"])
    assert world.restart() == []
    server.webhook = None
    world.expect("AllReady")


@cases(
    "there, have, is_gone",
    """
    nothing has changed: {there: {}}
    deleted: {there: null, is_gone: true}
    recreated: {there: {uid: u-2}, is_gone: true}
    being deleted: {there: {deletionTimestamp: now}, is_gone: true}
    an orphan: {there: {}, have: {ownerReferences: null}}
    an orphan of a deleted one: {there: null, have: {ownerReferences: null}, is_gone: true}
    deleted, but its DaemonSet is there: {there: null, have: {}}
    """,
    have=None,
    is_gone=False,
)
@pytest.mark.parametrize("made, status", [("d-0", {}), ("", {"nodes": {}})], ids=["", "restarted"])
def test_no_daemonset_is_made_or_adopted_for_a_schedext_that_is_gone(
    mocker, there, have, is_gone, made, status
):
    operator = sked.Operator(mocker.Mock())
    operator.memories[ONE] = sked.Memory(given())
    operator.memories[ONE].daemonset_uid = made
    schedext = None if there is None else merge(given(), {"metadata": there})
    daemonset = None if have is None else merge(STORED, {"metadata": have})
    if daemonset:
        operator.daemonsets.objects[ONE] = daemonset
    asked = {sked.path_to(sked.DAEMONSETS, *ONE): daemonset}
    operator.api.get.side_effect = lambda path: copy(asked.get(path, schedext))
    with pytest.raises(sked.ApiError, match="is gone") if is_gone else contextlib.nullcontext():
        found = operator.find_daemonset(ONE, given() | {"status": status})
        assert bool(found) is bool(daemonset)


def test_a_cached_daemonset_that_is_older_than_our_last_write_is_not_believed(mocker):
    key = ("tools", "scx-rusty")
    older, newer = stamped(STORED), merge(stamped(STORED, generation=2), LATER)
    operator = sked.Operator(mocker.Mock())
    memory = operator.memories[key] = sked.Memory(given())
    memory.wrote_daemonset(newer, sked.stamp_of(newer))
    operator.daemonsets.store({key: older})
    operator.api.get.return_value = copy(newer)
    assert operator.find_daemonset(key, given())["metadata"]["generation"] == 2
    operator.daemonsets.store({key: newer})
    operator.api.get.side_effect = AssertionError("the cache is as new as our last write")
    assert operator.find_daemonset(key, given()) == newer


def test_after_a_create_without_an_answer_the_stamp_that_is_there_is_trusted(mocker):
    operator = sked.Operator(mocker.Mock())
    memory = operator.memories[ONE] = sked.Memory(given())
    memory.daemonset_uid = "d-0"  # of the DaemonSet that was there before
    operator.api.request.side_effect = sked.ApiError(0, "no answer")
    seen = sked.Observed(given() | {"status": {}}, None, sked.NO_STAMP, [], [])
    with pytest.raises(sked.ApiError):
        operator.write_daemonset(ONE, seen, stamped(STORED))
    assert memory.stamp_to_trust(stamped(STORED)) == sked.Stamp(**STAMP)


def test_an_unreadable_pod_is_logged_with_its_traceback_and_affects_no_other_pod(
    world, fleet, caplog
):
    fleet.report(fleet.pods("x")["b"], {"containerStatuses": ["not", "a", "map"]})
    eventually(lambda: caplog.text, contains("unexpected error in reading this pod"))
    assert "Traceback" in caplog.text
    assert "cannot talk to" not in caplog.text
    fleet.add_node("new")
    eventually(lambda: world.nodes()["ready"], 4)
    caplog.clear()  # no other test may log a traceback


def test_an_operator_ends_if_it_is_stopped_before_its_caches_are_filled(world, server):
    missing = server.fault("GET", "/pods", None)
    world.begin()
    eventually(lambda: missing.hits)
    spent = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - spent < 0.15  # they wait without a busy loop
    world.stop()  # waits until its workers have ended


# ---------------------------------------------------------------- kills and signals


def test_repeated_kills_leave_exactly_one_daemonset_per_schedext(server, launch):
    made = {f"scx-{n}": server.create(schedext(f"scx-{n}"))["metadata"]["uid"] for n in range(60)}
    enough = 0

    def limited(obj: dict) -> dict:
        if len(server.objects["daemonsets"]) >= enough:
            raise Refusal(500, "no more for now")
        return obj

    server.webhook = admission("create daemonsets", limited)
    for enough in (1, 20, 40, 60):
        operator = launch()
        eventually(lambda: len(images(server)), enough)
        operator.stop(signal.SIGKILL)
    owners = {
        obj["metadata"]["name"]: dig(obj, "metadata.ownerReferences.0.uid")
        for obj in server.list("daemonsets")
    }
    assert owners == made
    assert {r.verb for r in server.writes() if r.what == "daemonsets"} == {"create"}


def lease_in(namespace: str) -> tuple[str, str]:
    return "--leader-elect", f"--leader-election-namespace={namespace}"


@pytest.mark.parametrize(
    "method, path, sent",
    [
        pytest.param("GET", "watch=true", signal.SIGINT, id="watching"),
        pytest.param("POST", "/daemonsets", signal.SIGTERM, id="writing"),
        pytest.param("GET", "/leases", signal.SIGTERM, id="standing by"),
    ],
)
def test_a_signal_stops_sked_even_while_it_is_blocked(server, launch, method, path, sent):
    server.create(schedext("scx"))
    hangs = server.fault(method, path, None, "hang")
    operator = launch(*(lease_in("sked-system") if path == "/leases" else ()))
    eventually(lambda: hangs.hits)
    assert operator.stop(sent) == 0
    assert "Traceback" not in operator.said


# ---------------------------------------------------------------- leader election

LEASE = "b4c95cb3.schedkit.io"
MASTER = 'leader_election_master_status{name="b4c95cb3.schedkit.io"}'


def lease(server: ApiServer, namespace: str = "sked-system") -> dict:
    return dig(server.get("leases", namespace, LEASE), "spec") or {}


def leading(replicas: list[OperatorProcess]) -> list[OperatorProcess]:
    alive = [one for one in replicas if one.process.poll() is None]
    return [one for one in alive if " leading\n" in one.said]


def waiting(replicas: list[OperatorProcess]) -> list[OperatorProcess]:
    return [one for one in replicas if "waiting for the lease" in one.said]


def test_one_of_three_replicas_leads_and_hands_over_on_sigterm(server, launch):
    replicas = [launch(*lease_in("sked-system"), is_hasty=True) for _ in range(3)]
    [first] = eventually(lambda: leading(replicas))
    server.create(schedext("one"))
    eventually(lambda: "one" in images(server) and waiting(replicas), replicas)
    said = sorted(ask(one.port, "/readyz")[:2] for one in replicas)
    assert said == [(200, "ok\n"), (200, "standing by\n"), (200, "standing by\n")]
    before = lease(server)
    eventually(lambda: lease(server)["renewTime"] > before["renewTime"])

    assert first.stop() == 0
    assert first.said.count(" leading\n") == 1
    holders = [dig(change.obj, "spec.holderIdentity") for change in server.log["leases"]]
    assert "" in holders  # released, so nobody waits until it expires
    eventually(lambda: leading(replicas))
    server.create(schedext("two"))
    eventually(lambda: images(server), contains("two"))
    assert (before["leaseTransitions"], lease(server)["leaseTransitions"]) == (0, 1)
    second, third = [one for one in replicas if one is not first]
    assert (second.stop(), third.stop(signal.SIGINT)) == (0, 0)
    assert lease(server)["holderIdentity"] == ""
    assert [r.status for r in server.writes() if r.what == "daemonsets"] == [201, 201]


def test_a_killed_or_frozen_leader_is_replaced_when_its_lease_expires_and_writes_nothing_more(
    server, launch
):
    signals = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
    leaders = [launch(*lease_in(name), user="other", is_hasty=True) for name in signals]
    eventually(lambda: leading(leaders), leaders)
    # another user, to tell the writes apart
    others = [launch(*lease_in(name), user="admin", is_hasty=True) for name in signals]
    eventually(lambda: waiting(others), others)
    for n, sent in enumerate(signals.values()):
        leaders[n].process.send_signal(sent)
    renewals = [lease(server, name)["renewTime"] for name in signals]
    for n in range(20):
        server.create(schedext(f"scx-{n}"))
    eventually(lambda: leading(others), others)
    takeovers = [lease(server, name)["acquireTime"] for name in signals]
    for renewed, taken in zip(renewals, takeovers, strict=True):
        assert sked.unix_time(taken) - sked.unix_time(renewed) > HASTE["LEASE_SECONDS"]
    taken = time.time()
    eventually(lambda: len(images(server)), 20)
    assert leaders[1].stop(signal.SIGCONT) == 1
    assert "another replica may lead now" in leaders[1].said
    # its renewal may have been under way; the lease's version makes that fail
    assert {r.what for r in server.writes(taken, "other")} <= {"leases"}


def test_a_leader_survives_one_failed_renewal_and_exits_after_many(server, launch):
    actions = ("lose", "hang", "error")
    leaders = [launch(*lease_in(action), user="other", is_hasty=True) for action in actions]
    eventually(lambda: leading(leaders), leaders)
    for action in actions:  # after a failed renewal, a leader reads the lease, which may fail, too
        faults = [server.fault(method, f"/{action}/leases", 1, action) for method in ("PUT", "GET")]
        eventually(lambda faults=faults: [fault.hits for fault in faults], [1, 1])
        old = lease(server, action)["renewTime"]
        eventually(lambda a=action, old=old: lease(server, a)["renewTime"] > old)
    assert leading(leaders) == leaders
    renewals = [lease(server, action)["renewTime"] for action in actions]
    for action in actions:
        server.fault("PUT", f"/{action}/leases", None, action)
    assert [one.process.wait(60) for one in leaders] == [1, 1, 1]
    assert min(map(seconds_ago, renewals)) > HASTE["RENEW_DEADLINE_SECONDS"]


def test_a_leader_whose_lease_is_taken_exits(server, mocker):
    mocker.patch.object(sked, "monotonic", return_value=100.0)  # so that its lease never expires
    mocker.patch.object(sked.os, "_exit", side_effect=SystemExit)
    taken = {"spec": {"holderIdentity": "another"}}
    operator = mocker.Mock()
    operator.stop.is_set.side_effect = [False] * 5 + [True]
    operator.stop.wait.side_effect = lambda _: server.patch("leases", "sked-system", LEASE, taken)
    with pytest.raises(SystemExit):
        sked.Elector(connect(server.kubeconfig("sked")), "sked-system").run(operator)
    operator.start.assert_called_once()
    assert lease(server)["holderIdentity"] == "another"


def test_a_leader_that_stops_renewing_writes_nothing_more(mocker):
    clock = mocker.patch.object(sked, "monotonic", return_value=100.0)
    mocker.patch.object(sked.os, "_exit", side_effect=SystemExit)
    elector = sked.Elector(mocker.Mock(), "sked-system")
    elector.has_led, elector.renewed_at = True, 100.0
    operator = sked.Operator(mocker.Mock(), elector=elector)
    operator.write("POST", "/in-time", {})
    clock.return_value += sked.RENEW_DEADLINE_SECONDS
    with pytest.raises(SystemExit):
        operator.write("POST", "/late", {})
    operator.api.request.assert_called_once()


def test_trouble_with_the_lease_is_logged_unless_another_replica_was_faster(mocker, caplog):
    caplog.set_level("INFO")
    operator = mocker.Mock(faults=sked.Faults())
    operator.stop.is_set.side_effect = [False] * 3 + [True]
    elector = sked.Elector(mocker.Mock(), "sked-system")
    outcomes = [sked.ApiError(409, "too late"), sked.ApiError(0, "down"), None]
    mocker.patch.object(elector, "take", side_effect=outcomes)
    elector.run(operator)
    assert caplog.messages[1:] == ["down; trying again", ENDED]
    assert operator.beat.call_count == 3


@pytest.mark.parametrize("is_idle", [True, False])
def test_the_lease_is_handed_over_only_if_all_work_has_ended(server, mocker, is_idle):
    operator = mocker.Mock(**{"queue.close.return_value": is_idle})
    operator.stop.is_set.side_effect = [False, True]
    elector = sked.Elector(connect(server.kubeconfig("sked")), "sked-system")
    elector.run(operator)
    assert lease(server)["holderIdentity"] == ("" if is_idle else elector.identity)


@pytest.mark.parametrize("year", [2001, 2099])
def test_a_lease_is_respected_while_it_is_renewed_whatever_its_holders_clock_says(
    server, mocker, year
):
    clock = mocker.patch.object(sked, "monotonic")
    clock.return_value = 100.0
    api = connect(server.kubeconfig("sked"))
    holder, other = [sked.Elector(api, "sked-system") for _ in range(2)]
    holder.take()
    for second in range(5):
        renewal = {"renewTime": f"{year}-01-01T00:00:0{second}.000000Z", "leaseDurationSeconds": 30}
        server.patch("leases", "sked-system", LEASE, {"spec": renewal})
        for _ in range(3):
            other.take()
            clock.return_value += 9.9
    assert lease(server)["holderIdentity"] == holder.identity
    clock.return_value += 0.4
    other.take()
    assert (other.leads(), lease(server)["holderIdentity"]) == (True, other.identity)


def test_a_leader_keeps_leading_if_every_answer_is_slow(server, mocker):
    clock = mocker.patch.object(sked, "monotonic")
    clock.return_value = 100.0
    api = connect(server.kubeconfig("sked"))
    request = api.request
    led = []

    def slowly(method, path, body=None, timeout=30.0):
        clock.return_value += 3.5
        led.append(elector.leads())
        assert 3.5 < timeout < 5
        return request(method, path, body)

    mocker.patch.object(api, "request", side_effect=slowly)
    elector = sked.Elector(api, "sked-system")
    for _ in range(9):
        elector.take()
        clock.return_value += sked.RENEW_SECONDS
        led.append(elector.leads())
    assert led == [False, False] + [True] * 17
    clock.return_value += 5  # the lease counts from the request, not from the answer
    assert not elector.leads()


# ---------------------------------------------------------------- health and metrics


def test_sked_is_healthy_at_once_and_ready_when_all_caches_are_filled(world, server):
    missing = server.fault("GET", "/pods", None)
    world.begin()
    port, _ = world.serve()
    eventually(lambda: missing.hits, at_least(3))
    assert (ask(port, "/readyz")[0], ask(port, "/healthz?verbose")[0]) == (503, 200)
    missing.clear()
    eventually(lambda: ask(port, "/readyz")[:2], (200, "ok\n"))
    assert ask(port, "/metrics")[0] == 404


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_fails_if_a_thread_hangs_or_dies_but_not_if_the_api_server_is_silent(
    world, server, haste, mocker
):
    stuck = 5 * sked.WATCH_SECONDS
    world.set("STUCK_SECONDS", stuck)
    world.start()
    port, _ = world.serve()
    world.add()
    server.freeze()
    end = time.monotonic() + 1.2 * stuck
    while time.monotonic() < end:
        assert ask(port, "/healthz")[:2] == (200, "ok\n")
        time.sleep(0.05)
    over = threading.Event()

    def hang(*_):
        over.wait()
        raise sked.Blocked("RollingOut", "it hung", math.inf)

    mocker.patch.object(sked, "plan", side_effect=hang)
    server.thaw()
    mocker.patch.object(sked.Pods, "store", side_effect=SystemExit)
    lost = re.compile(r"no sign of life from pods, worker-\d\n")
    eventually(lambda: ask(port, "/healthz")[0] == 503 and lost.fullmatch(ask(port, "/healthz")[1]))
    over.set()


@pytest.mark.parametrize("tls", [False, True], ids=["health", "metrics"])
def test_half_sent_requests_block_no_others(world, mocker, tls):
    mocker.patch.object(sked.Handler, "timeout", 600)
    world.start()
    port = world.serve()[tls]
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a TLS handshake
        assert ask(port, "/", tls=tls)[0] == 404


def test_metrics_count_requests_and_reconciles(world, server):
    world.start()
    _, port = world.serve("--metrics-secure=false")
    server.fault("POST", "/daemonsets")
    world.add()
    passes = 'controller_runtime_reconcile_total{controller="schedext",result="%s"}'
    eventually(lambda: sked.METRICS.copy().get(passes % "success", 0), at_least(2))
    refusals = 'rest_client_requests_total{code="500",method="POST"}'
    expected = {passes % "error": 1, refusals: 1, MASTER: 1}
    assert expected.items() <= metrics_in(ask(port, "/metrics")[1]).items()


def test_metrics_tell_every_reason_and_the_nodes_of_what_is_not_suspended(mocker):
    mocker.patch.object(sked, "METRICS", sked.Metrics())
    elector = mocker.Mock(**{"leads.return_value": False})
    operator = sked.Operator(mocker.Mock(), elector=elector)
    operator.queue.add(("tools", "on"))
    status = status_of(observed(["settled", "crashing"]))
    for name in ("on", "off"):
        obj = for_nodes("", name, suspend=name == "off") | {"status": status}
        operator.schedexts.objects[name] = obj
    nodes = 'sked_schedext_nodes{namespace="tools",name="on",state="%s"}'
    reason = 'sked_schedext_status{namespace="tools",name="%s",reason="NodesFailing"}'
    assert metrics_in(sked.metrics(operator)[1]) == {
        'workqueue_depth{name="schedext"}': 1,
        MASTER: 0,
        nodes % "desired": 2,
        nodes % "ready": 1,
        nodes % "updated": 2,
        nodes % "failing": 1,
        reason % "on": 1,
        reason % "off": 1,
        f'sked_build_info{{version="{sked.__version__}"}}': 1,
    }


def test_a_histogram_has_its_sum_its_count_and_all_its_buckets_in_order():
    metrics = sked.Metrics()
    for seconds in (0.25, 0.001, 99.0):
        metrics.reconciled("success", seconds)
    samples = metrics_in(metrics.text({}))
    numbers = [count for name, count in samples.items() if "_seconds" in name]
    assert numbers == [99.251, 3, 1, 1, 2, 2, 3]


def test_only_users_whom_the_api_server_allows_can_read_metrics(world, server, caplog):
    caplog.set_level(logging.DEBUG)
    server.tokens |= {"token-of-reader": "reader", "token-of-nobody": "nobody"}
    binding = {
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "readers"},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": "sked-metrics-reader"},
        "subjects": [{"apiGroup": RBAC, "kind": "User", "name": "reader"}],
    }
    server.create(binding)
    world.start()
    _, port = world.serve()

    def get(token):
        return ask(port, "/metrics", token=token, tls=True)[0]

    assert [get(f"token-{who}") for who in ("of-nobody", "of-stranger")] == [403, 401]
    assert (get(""), sum(r.resource == "tokenreviews" for r in server.requests)) == (401, 2)
    assert "sked_build_info" in ask(port, "/metrics", token="token-of-reader", tls=True)[1]
    server.fault("POST", "/subjectaccessreviews")
    server.tokens["token-of-late"] = "reader"
    assert [get("token-of-late") for _ in range(2)] == [503, 200]
    del server.tokens["token-of-late"]
    world.set("monotonic", lambda: time.monotonic() + 60)
    assert get("token-of-late") == 401
    assert "token-of" not in caplog.text


def test_a_renewed_metrics_certificate_is_served(world, server):
    renew = f"req -x509 -subj /CN=x {NEW_KEY} -keyout tls.key -out tls.crt"
    openssl(server.folder, renew)
    world.start()
    _, port = world.serve(f"--metrics-cert-dir={server.folder}")
    openssl(server.folder, renew)
    shown = ssl.get_server_certificate(("127.0.0.1", port))
    assert shown == (server.folder / "tls.crt").read_text()


def test_a_certificate_of_our_own_goes_with_the_process(tmp_path):
    program = f"import os, sked; sked.tempfile.tempdir = {str(tmp_path)!r}\n"
    program += "print(*sorted(os.listdir(sked.self_signed())))"
    assert python("-c", program) == "tls.crt tls.key\n"
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the command line


@cases(
    "flag, context, environment, host",
    """
    flag: {flag: ~/flag, environment: ~/env, host: "http://f1"}
    flag and context: {flag: ~/flag, context: f2, host: "http://f2"}
    environment: {environment: ~/env, host: "http://e1"}
    first current-context wins: {environment: "~/none:~/silent:~/env:~/flag", host: "http://e1"}
    current-context in another file: {environment: "~/other:~/flag:~/env", host: "http://e1"}
    context in the second file: {context: e1, environment: "~/flag:~/env", host: "http://e1"}
    pod: {host: "https://127.0.0.1:6443"}
    home: {environment: null, host: "http://h1"}
    """,
    flag=None,
    context=None,
    environment="",
)
def test_the_configuration_comes_from_flag_environment_pod_or_home_in_this_order(
    in_pod, monkeypatch, flag, context, environment, host
):
    monkeypatch.setenv("KUBECONFIG", environment or "")
    if environment is None:
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert sked.load_configuration(flag, context).host == host


@cases(
    "flags, problem",
    """
    no default:
      flags: --kubeconfig=
      problem: "cannot use the kubeconfig ~/.kube/config: there is no such file; choose another one
        with --kubeconfig, $KUBECONFIG or --context"
    no such context: {flags: --context=x, problem: "~/env: ... name x in"}
    no current-context: {flags: --kubeconfig=~/silent, problem: "~/silent: ... current-context"}
    not a kubeconfig: {flags: --kubeconfig=~/text, problem: "cannot use the kubeconfig ~/text:"}
    not YAML: {flags: --kubeconfig=~/broken, problem: "~/broken: ... line 1, column 5"}
    no lease namespace: {flags: --leader-elect, problem: needs --leader-election-namespace outside}
    port in use:
      flags: "--health-probe-bind-address=127.0.0.1:{taken}"
      problem: "cannot listen on 127.0.0.1:{taken}: Address already in use; choose another address
        with --health-probe-bind-address, or 0"
    port of the metrics in use:
      flags: "--metrics-bind-address=127.0.0.1:{taken} --metrics-secure=false"
      problem: "choose another address with --metrics-bind-address, or 0"
    no certificate:
      flags: "--metrics-bind-address=127.0.0.1:0 --metrics-cert-dir=/none"
      problem: cannot load tls.crt and tls.key from /none
    no openssl: {flags: "--metrics-bind-address=127.0.0.1:0", problem: --metrics-cert-dir}
    """,
)
def test_a_failed_start_says_in_one_line_what_is_wrong(home, monkeypatch, flags, problem):
    (home / ".kube" / "config").unlink()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        argv = "--kubeconfig=~/env --health-probe-bind-address=0 " + flags.format(taken=taken)
        said = sked.main(argv.split())
    words = map(re.escape, problem.format(taken=taken).split("..."))
    assert re.fullmatch(f"sked: .*{'.*'.join(words)}.*", said)


def test_a_program_that_imports_sked_can_handle_missing_packages():
    program = "import sys; sys.path.insert(0, '.')\n"
    program += "try: import sked\nexcept ImportError as error: print('missing', error.name)"
    assert python("-I", "-S", "-c", program).startswith("missing ")


def test_a_refused_token_is_told_to_log_in_again(server, tmp_path):
    clusters = {"x": {"server": f"http://127.0.0.1:{server.port}"}}
    path = write_kubeconfig(tmp_path / "config", "x", clusters, {"token": "wrong"})
    assert call_fails(connect(path), "Unauthorized: the token .* has expired; log in again")


def test_a_refusal_without_words_is_told_by_its_status(mocker):
    answer = mocker.Mock(data=b"", status=502)
    assert str(sked.Api.refusal(mocker.Mock(), answer)) == "HTTP status 502"


def test_certificates_are_not_checked_as_strictly_as_python_3_13_would(mocker):
    context = ssl.create_default_context()
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # Python 3.13's default
    mocker.patch.object(ssl, "create_default_context", return_value=context)
    assert not sked.client_tls(sked.Configuration()).verify_flags & ssl.VERIFY_X509_STRICT


@cases(
    "flags, name, value",
    """
    switched on: [--leader-elect, leader_elect, true]
    T for true: [--leader-elect=T, leader_elect, true]
    in a word: [--leader-elect=true, leader_elect, true]
    0 for false: [--metrics-secure=0, metrics_secure, false]
    without effect:
    - "--enable-http2=true --zap-devel --zap-encoder=json --zap-log-level=5
      --zap-stacktrace-level=panic --zap-time-encoding=rfc3339"
    - log_level
    - info
    level in upper case: [--log-level=DEBUG, log_level, debug]
    no metrics by default: ["", metrics_bind_address, "0"]
    health by default: ["", health_probe_bind_address, ":8081"]
    the last port: ["--metrics-bind-address=:65535", metrics_bind_address, ":65535"]
    """,
)
def test_flags_mean_the_same_as_in_the_go_operator(flags, name, value):
    assert getattr(sked.parse(flags.split()), name) == value


@cases(
    "flag, words",
    """
    neither true nor false: [--leader-elect=maybe, "'maybe' is neither true nor false"]
    abbreviated: [--leader, "unrecognized arguments: --leader"]
    level: [--log-level=loud, "argument --log-level: invalid choice: 'loud'"]
    address: [--metrics-bind-address=x, "'x' is neither an address like :8081 nor 0"]
    no number: ["--health-probe-bind-address=:http", "':http' is neither an address like"]
    port: ["--health-probe-bind-address=:65536", "':65536' is neither an address like"]
    """,
)
def test_unsupported_flags_are_refused_with_a_reason(capsys, flag, words):
    with pytest.raises(SystemExit, match="2"):
        sked.main([flag])
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_the_lease_is_in_the_pods_own_namespace(mocker):
    opened = mocker.patch("builtins.open", mocker.mock_open(read_data="team-a\n"))
    assert sked.pod_namespace() == "team-a"
    path = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
    assert opened.call_args == mocker.call(path)


def test_render_prints_daemonsets_that_yield_to_each_other(capsys, tmp_path):
    day = datetime(2020, 1, 2).date()  # as YAML reads it
    objs = [schedext("all", args=[day]), {"kind": "Pod"}, schedext("pool", LAVD, nodeSelector=A)]
    (tmp_path / "file").write_text(yaml.safe_dump_all(objs))
    assert not sked.main([f"--render={tmp_path}/file"])
    out = capsys.readouterr().out
    made = list(yaml.safe_load_all(out))
    containers = [pod_spec(obj)["containers"][0] for obj in made]
    assert [container["image"] for container in containers] == [RUSTY, LAVD]
    assert containers[0]["args"] == ["2020-01-02"]
    assert [terms(obj) for obj in made] == [["pool!=a"], []]
    got = yaml.safe_dump({"kind": "List", "items": objs})
    assert python("sked.py", "--render", "-", text=got) == out


@cases(
    "metadata, spec, words, api_version",
    """
    spec not a map: {spec: text, words: "SchedExt x: spec.sched is missing: it names the image"}
    empty image: {spec: {sched: ""}, words: "SchedExt x: spec.sched is missing"}
    image not text: {spec: {sched: 5}, words: "spec.sched must be text, not 5"}
    no name: {metadata: {}, words: "a letter or digit, not None"}
    metadata not a map: {metadata: x, words: "SchedExt ?: metadata.name must be text"}
    a number as name: {metadata: {name: 5}, words: "SchedExt 5: metadata.name must be text"}
    a name that no object may have: {metadata: {name: Bad_Name}, words: "digit, not 'Bad_Name'"}
    another version: {api_version: v2, words: "apiVersion must be sked.schedkit.io/v1, not v2"}
    unknown field: {spec: {sched: x, image: y}, words: "SchedExt x: spec.image: unknown field"}
    text as a switch: {spec: {sched: x, suspend: "yes"}, words: "must be true or false, not 'yes'"}
    a switch as a number: {spec: {sched: x, minReadySeconds: true}, words: must be a whole number}
    a list as nodeSelector: {spec: {sched: x, nodeSelector: [a]}, words: nodeSelector must be a map}
    a number as a label's value: {spec: {sched: x, nodeSelector: {pool: 1}}, words: "put '1' in"}
    hostPaths: {spec: {sched: x, hostPaths: 3}, words: "spec.hostPaths must be a list, not 3"}
    """,
    api_version="sked.schedkit.io/v1",
    metadata={"name": "x"},
    spec={"sched": "x"},
)
def test_render_says_in_one_line_what_is_wrong_with_which_schedext(
    capsys, tmp_path, metadata, spec, words, api_version
):
    wrong = {"apiVersion": api_version, "kind": "SchedExt", "metadata": metadata, "spec": spec}
    (tmp_path / "file").write_text(yaml.safe_dump_all([schedext("fine"), wrong]))
    problem = sked.main([f"--render={tmp_path}/file"])
    assert re.fullmatch(f"sked: {tmp_path}/file: .*{re.escape(words)}.*", problem)
    assert capsys.readouterr().out == ""


@cases(
    "text, words",
    """
    no date: ["a: 2020-99-99", "is not valid YAML: month must be in 1..12"]
    empty List: ["{kind: List, items: }", has no object of kind SchedExt]
    List of numbers: ["{kind: List, items: [5]}", has no object of kind SchedExt]
    number: ["5", has no object of kind SchedExt]
    """,
)
def test_render_says_in_one_line_what_is_wrong_with_which_file(capsys, tmp_path, text, words):
    (tmp_path / "file").write_text(text)
    problem = sked.main([f"--render={tmp_path}/file"])
    assert re.fullmatch(f"sked: {tmp_path}/file:? .*{re.escape(words)}.*", problem)
    assert capsys.readouterr().out == ""


def test_render_names_stdin_and_the_line_that_is_no_yaml():
    said = python("sked.py", "--render", "-", text="kind: SchedExt\nspec: [\n")
    assert re.fullmatch("sked: stdin is not valid YAML: .* line 3, column 1.*\n", said)


def test_an_interrupted_render_says_so_in_one_line(mocker):
    mocker.patch.object(sked, "render", side_effect=KeyboardInterrupt)
    assert sked.main(["--render=-"]) == "sked: interrupted"
    assert logging.Formatter.converter is time.gmtime  # the log says Z


@cases(
    "flags, problem",
    """
    missing packages:  # -S: without site-packages
    - -I -S sked.py --version
    - "No module named '.*': .* 'pip install -r requirements.txt'"
    no file: [sked.py --render=/none.yaml, "cannot read /none.yaml: No such file or directory"]
    """,
)
def test_a_problem_is_one_line_on_stderr_and_exit_code_1(flags, problem):
    command = [sys.executable, *flags.split()]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(f"sked: {problem}\n", done.stderr)


# ---------------------------------------------------------------- install.yaml: the CRD

DIGEST = "sha256:" + "0123456789abcdef" * 4
PINNED = f"registry.example.com/scx_rusty@{DIGEST}"
# Values of each field that are accepted, and refused with a message that has these words.
ACCEPTED = yaml.safe_load("""
sched: [scx_rusty, "localhost:5000/a/b:v1", "Registry.Example.com:5000/team/scx:1.2.3",
  "[2001:db8::A]:5000/a/scx:tag", a.b_c__d-e---f/x1, "scx:_a.b-C"]
nodeSelector: [{pool: latency, kubernetes.io/arch: arm64, "1": A.b_c-9}]
tolerations:
- [{operator: Exists}]
- [{key: a, value: b, effect: NoExecute, tolerationSeconds: 0}, {key: a}]
imagePullSecrets: [[{name: a}, {name: b.c}]]
env:
- - {name: a.b-c_D, value: $(A)}
  - {name: B}
  - {name: C, valueFrom: {secretKeyRef: {name: s, key: k.x_Y-1, optional: true}}}
  - {name: D, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: 1Mi}}}
resources:
- {requests: {cpu: 0}, limits: {cpu: ".5", memory: 1.5Gi, example.com/dongle: "1"}}
- {limits: {cpu: "5.", memory: 1E}}
updateStrategy:
- {type: OnDelete}
- {type: RollingUpdate, rollingUpdate: {maxUnavailable: 5}}
- {rollingUpdate: {maxUnavailable: 100%}}
hostPaths: [[/a b/..c/d../..., /x/.y]]
""")
ACCEPTED["sched"] += [f"[::1]:5000/scx:1@{DIGEST}", "scx:" + "t" * 128, "a" * 200]
ACCEPTED["nodeSelector"] += [{"k" * 63: "v" * 63}]
REFUSED = yaml.safe_load("""
must be an image reference, [registry[:port]/]path[:tag][@sha256:digest]:
  sched: ["", " scx", "scx\\n", ghcr.io/Schedkit/scx, scx/, a//b, scx-, a___b, "scx:a:b",
    "scx:-tag", "scx@sha256:0123", "ghcr.io:port/scx", "[::1/scx", user@host/scx]
  probeImage: ["https://busybox"]
spec.sched in body must be of type string: {sched: [5]}
"must be node labels, such as pool: latency":
  nodeSelector: [{pool: low latency}, {pool: a-}, {pool: "a\\n"}, {/a: a}, {A.io/b: a}, {a/b/c: a}]
spec.nodeSelector.pool in body must be of type string: {nodeSelector: [{pool: true}]}
"a toleration needs a key, or else operator: Exists":
  tolerations: [[{}], [{operator: Equal, value: x}]]
"spec.tolerations[0].key in body should be at least 1 chars long":
  tolerations: [[{key: "", operator: Exists}]]
"spec.tolerations[0].value in body should match": {tolerations: [[{key: a, value: b c}]]}
"operator: Exists takes no value": {tolerations: [[{key: a, operator: Exists, value: b}]]}
"tolerationSeconds only goes with effect: NoExecute":
  tolerations: [[{key: a, tolerationSeconds: 3}]]
'operator: Unsupported value: "Lt"': {tolerations: [[{key: a, operator: Lt}]]}
'effect: Unsupported value: "Never"': {tolerations: [[{key: a, effect: Never}]]}
spec.priorityClassName in body should match: {priorityClassName: [High]}
"spec.imagePullSecrets[0].name: Required value": {imagePullSecrets: [[{}]]}
"spec.imagePullSecrets[1]: Duplicate value": {imagePullSecrets: [[{name: a}, {name: a}]]}
'imagePullPolicy: Unsupported value: "always"': {imagePullPolicy: [always]}
"spec.args[1] in body must be of type string": {args: [[--slice-us, 5000]]}
"spec.env[0].name: Required value": {env: [[{value: x}]]}
"spec.env[0].name in body should match": {env: [[{name: A=B}]]}
"spec.env[1]: Duplicate value": {env: [[{name: A}, {name: A}]]}
a variable has either a value or a valueFrom, not both:
  env: [[{name: A, value: b, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]]
"valueFrom needs exactly one of: configMapKeyRef, secretKeyRef, fieldRef, resourceFieldRef":
  env:
  - [{name: A, valueFrom: {}}]
  - - name: A
      valueFrom: {configMapKeyRef: {name: m, key: k}, secretKeyRef: {name: m, key: k}}
"spec.env[0].valueFrom.secretKeyRef.name: Required value":
  env: [[{name: A, valueFrom: {secretKeyRef: {key: m}}}]]
spec.resources.limits.memory in body should match:
  resources: [{limits: {memory: 64MB}}, {limits: {memory: "-1"}}, {limits: {memory: 1e999}}]
spec.resources.requests.cpu in body should be greater than or equal to 0:
  resources: [{requests: {cpu: -1}}]
spec.resources.requests.cpu in body must be of type: {resources: [{requests: {cpu: 0.5}}]}
'terminationMessagePolicy: Unsupported value: "Logs"': {terminationMessagePolicy: [Logs]}
must be a number of nodes from 1 up, or a percentage from 1% to 100%:
  updateStrategy:
  - {rollingUpdate: {maxUnavailable: 0}}
  - {rollingUpdate: {maxUnavailable: 0%}}
  - {rollingUpdate: {maxUnavailable: 101%}}
  - {rollingUpdate: {maxUnavailable: 1.5%}}
"rollingUpdate only goes with type: RollingUpdate":
  updateStrategy: [{type: OnDelete, rollingUpdate: {maxUnavailable: 1}}]
'updateStrategy.type: Unsupported value: "Recreate"': {updateStrategy: [{type: Recreate}]}
spec.minReadySeconds in body should be greater than or equal to 0: {minReadySeconds: [-1]}
spec.suspend in body must be of type boolean: {suspend: ["yes", 1]}
must be an absolute path such as /sys/kernel/debug:
  hostPaths: [[/], [/sys/], [/sys//kernel], [/sys/..], [/sys/./kernel], ["/sys:/kernel"]]
"spec.hostPaths[2]: Duplicate value": {hostPaths: [[/sys, /proc, /sys]]}
unknown field "spec.replicas": {replicas: [3]}
unknown field "spec.updateStrategy.rollingUpdate.maxSurge":
  updateStrategy: [{rollingUpdate: {maxSurge: 1}}]
""")
REFUSED |= {
    "Too long: may not be more than 512 bytes": {"sched": ["a" * 513]},
    ":port]/]path[:tag]": {"sched": ["scx:" + "t" * 129]},
    "Too long: may not be more than 63 bytes": {"nodeSelector": [{"pool": "a" * 64}]},
    "Too many: 33: must have at most 32 items": {"hostPaths": [[f"/{n}" for n in range(33)]]},
    "have at most 63 characters": {"nodeSelector": [{"k" * 64: "a"}]},
    'a domain and "/" before it': {"nodeSelector": [{"d." * 200 + "io/k": "a"}]},
}
LONG_NAME = "the name of a SchedExt may have at most 63 characters"


def cel_messages(schema: dict) -> Iterator[str]:
    """What the CRD's rules in CEL say, which only a real API server evaluates."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield rule["message"]
    inner = [*schema.get("properties", {}).values()]
    inner += [schema[name] for name in ("items", "additionalProperties") if name in schema]
    for part in inner:
        yield from cel_messages(part)


CEL_MESSAGES = list(cel_messages(SCHEMA))


def test_sked_knows_exactly_the_fields_of_the_crd():
    types = {"string": str, "object": dict, "array": list, "boolean": bool, "integer": int}
    fields = SCHEMA["properties"]["spec"]["properties"]
    assert {name: types[field["type"]] for name, field in fields.items()} == sked.FIELDS
    assert {"sched", *ALL_FIELDS} == sked.FIELDS.keys()  # what each of them does: see above


def test_only_min_ready_seconds_has_a_default(crd):
    spec = dry_run(crd, schedext("x"))["spec"]
    assert spec == {"sched": RUSTY, "minReadySeconds": 10}


def test_every_validation_rule_has_an_example_that_it_refuses():
    known = [*REFUSED, LONG_NAME]
    assert [text for text in CEL_MESSAGES if not any(words in text for words in known)] == []


@pytest.fixture(scope="module")
def crd(request: Any) -> Iterator[ApiServer | RealCluster]:
    """What has the CRD, for tests that store nothing: a real cluster if there is one."""
    if "SKED_TEST_KUBECONFIG" in os.environ:
        yield request.getfixturevalue("real")
        return
    with ApiServer() as server:
        yield server


def dry_run(api: ApiServer | RealCluster, obj: dict) -> dict:
    """The object as the API server would store it."""
    path = api.kind_of(obj).path("default")
    return api.call("POST", f"{path}?dryRun=All&fieldValidation=Strict", obj)


def specs(values: dict[str, list]) -> list[dict]:
    """A spec for each value of each field."""
    return [{field: value} for field in values for value in values[field]]


def start_of(spec: dict | str) -> str:
    return str(spec)[:50]


@pytest.mark.parametrize("spec", [*specs(ACCEPTED), ALL_FIELDS], ids=start_of)
def test_a_valid_schedext_is_accepted_and_so_is_its_daemonset(crd, spec):
    dry_run(crd, sked.build_daemonset(dry_run(crd, schedext("n" * 63, **spec))))


ROWS = [(words, spec) for words in REFUSED for spec in specs(REFUSED[words])]


@pytest.mark.parametrize("words, spec", ROWS, ids=start_of)
def test_an_invalid_schedext_is_refused_with_a_helpful_message(crd, words, spec):
    if isinstance(crd, ApiServer) and any(words in text for text in CEL_MESSAGES):
        pytest.skip("a rule in CEL, which only a real API server evaluates")
    with pytest.raises(Refusal, match=re.escape(words)):
        dry_run(crd, schedext("scx", **spec))


def test_a_name_too_long_for_a_label_is_refused(real):
    with pytest.raises(Refusal, match=LONG_NAME):
        dry_run(real, schedext("n" * 64))


# ---------------------------------------------------------------- install.yaml: the operator


def test_removing_only_the_operator_keeps_the_schedexts_and_the_roles_that_people_bind():
    label = ("app.kubernetes.io/component", "operator")
    kept = [obj for obj in manifests() if label not in obj["metadata"]["labels"].items()]
    assert [f"{obj['kind']} {obj['metadata']['name']}" for obj in kept] == [
        "Namespace sked-system",
        "CustomResourceDefinition schedexts.sked.schedkit.io",
        "ClusterRole sked-metrics-reader",
        "ClusterRole sked-schedext-editor-role",
        "ClusterRole sked-schedext-viewer-role",
    ]


def test_probes_and_service_use_the_ports_that_the_operator_listens_on():
    (manager,) = pod_spec(installed_one("Deployment"))["containers"]
    args = sked.parse(manager["args"])
    assert (args.leader_elect, args.metrics_secure) == (True, True)
    assert args.health_probe_bind_address == ":8081"
    assert manager["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": 8081}
    assert manager["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": 8081}
    assert args.metrics_bind_address == ":8443"
    assert installed_one("Service")["spec"]["ports"][0]["targetPort"] == 8443


def test_the_operator_uses_each_of_its_permissions(world, server):
    server.create(daemonset("orphan", "default"))
    server.create(unlabelled_daemonset("taken", "default"))
    for name in ("x", "orphan", "taken"):
        world.add(name)
    world.start()
    eventually(world.made)
    server.delete("daemonsets", "default", "x")
    sked.Elector(world.operator.api, "sked-system").take()
    sked.review(world.operator.api, "Bearer admin", 0)
    # a real API server checks these when sked sends other requests
    implied = {"update schedexts/finalizers", "delete daemonsets", "create leases"}
    granted = {
        f"{verb} {what}"
        for _, rule in server.rules("sked")
        for what in rule["resources"]
        for verb in rule["verbs"]
    }
    eventually(lambda: granted.difference(server.deeds()), implied)


def test_the_policy_holds_for_the_operators_service_account_only():
    policy = installed_one("ValidatingAdmissionPolicy")
    binding = installed_one("ValidatingAdmissionPolicyBinding")
    spec = {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    assert binding["spec"] == spec
    assert policy["spec"]["failurePolicy"] == "Fail"
    deployment = installed_one("Deployment")
    namespace = deployment["metadata"]["namespace"]
    user = f"system:serviceaccount:{namespace}:{pod_spec(deployment)['serviceAccountName']}"
    (condition,) = policy["spec"]["matchConditions"]
    assert condition["expression"] == f"request.userInfo.username == '{user}'"


# ---------------------------------------------------------------- README.md and the image

README = (HERE / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The README's fenced blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


EXAMPLES = [
    obj
    for block in blocks("yaml")
    for obj in yaml.safe_load_all(block)
    if obj.get("kind") == "SchedExt"
]


def test_the_version_is_the_same_everywhere():
    pattern = r'(?:/sked:|image.version="|kubernetes.io/version: )([\w.]+)'
    for name in ("README.md", "Dockerfile", "install.yaml"):
        assert set(re.findall(pattern, (HERE / name).read_text())) == {sked.__version__}


@pytest.mark.parametrize("obj", EXAMPLES, ids=lambda obj: obj["metadata"]["name"])
def test_every_schedext_in_the_readme_passes_the_schema_and_makes_a_daemonset(obj):
    wrong: list[str] = []
    check(SCHEMA, obj, "", wrong)
    assert wrong == []
    assert sked.build_daemonset(obj, EXAMPLES)


def test_sked_talks_to_an_api_server_without_what_the_image_leaves_out(secure, tmp_path):
    """Runs the Dockerfile's own commands on a copy of the package."""
    text = (HERE / "Dockerfile").read_text().replace("\\\n", "")
    runs = [run.split(" && ") for run in re.findall(r"^RUN (.*)", text, re.M)]
    commands = [command.strip() for run in runs for command in run]
    leave_out = [command for command in commands if command.startswith(("rm ", "find "))]
    (package,) = importlib.util.find_spec("kubernetes").submodule_search_locations
    folder = tmp_path / "kubernetes"
    shutil.copytree(package, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = sum(1 for _ in folder.rglob("*.py"))
    subprocess.run(["sh", "-ec", "\n".join(leave_out)], cwd=tmp_path, check=True)
    assert sum(1 for _ in folder.rglob("*.py")) < before / 2

    (secure.folder / "answer").write_text(json.dumps(CREDENTIAL | {"status": {"token": "sked"}}))
    logins = {
        "token": secure.kubeconfig("sked"),
        "plugin": plugin_kubeconfig(secure, "cat", str(secure.folder / "answer")),
        "certificate": secure.kubeconfig("other", certificate=True),
    }
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import sked, kubernetes\n"
    program += f"assert kubernetes.__path__ == [{str(folder)!r}]\n"
    program += "api = sked.Api(lambda: sked.load_configuration(sys.argv[1], None))\n"
    program += "print(api.request('GET', sys.argv[2])['kind'])\n"
    for path in logins.values():
        assert python("-B", "-c", program, str(path), A_LIST) == "SchedExtList\n"


def test_every_reason_that_sked_gives_is_in_the_readme_and_the_crd_and_no_other():
    blocked = re.findall(r'Blocked\(\s*"(\w+)"', inspect.getsource(sked))
    ready = re.findall(r'return "(\w+)"', inspect.getsource(sked.ready_reason))
    reason = dig(SCHEMA, "properties.status.properties.conditions.items.properties.reason")
    named = re.findall(r"[A-Z]\w+", reason["description"].partition("Ready: ")[2])
    assert sorted(named) == sorted({*blocked, *ready})
    assert [reason for reason in named if f"`{reason}`" not in README] == []


def test_every_metric_is_in_the_readme():
    names = [line.split()[0] for line in sked.METRICS_HELP.splitlines()]
    listed = README.partition("| metric |")[2].partition("\n\n")[0]
    assert names and [name for name in names if f"`{name}" not in listed] == []


def test_the_readmes_daemonsets_are_printed_as_documents_that_yield():
    rusty, lavd = yaml.safe_load_all(python("-c", blocks("python")[0]))
    assert [obj["metadata"]["name"] for obj in (rusty, lavd)] == ["scx-rusty", "scx-lavd"]
    assert terms(rusty) == ["pool!=latency"]


def test_the_readmes_own_program_says_what_it_watches_and_makes_a_daemonset(server, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig("sked")))
    server.create(schedext("x"))
    command = [sys.executable, "-u", "-c", blocks("python")[1]]
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        eventually(lambda: server.get("daemonsets", "default", "x"))
        process.kill()
    assert line.endswith(f" watches SchedExts at http://127.0.0.1:{server.port}\n")


@pytest.fixture(scope="module")
def attempt(real: RealCluster) -> Iterator[Callable[..., str]]:
    """What the API server says to a dry run in a namespace where both policies hold."""
    ns = real.namespace()
    for name, image, make in (
        ("own", RUSTY, daemonset),
        ("off", RUSTY, unlabelled_daemonset),
        ("pinned", PINNED, daemonset),
    ):
        obj = schedext(name, image, ns, suspend=name == "off", nodeSelector={"no": "where"})
        real.create(make(name, ns, real.create(obj)["metadata"]["uid"]))
    real.create(unlabelled_daemonset("foreign", ns))
    (block,) = [block for block in blocks("yaml") if "ValidatingAdmissionPolicy" in block]
    policy, binding = yaml.safe_load_all(block)
    policy["metadata"]["name"] = binding["metadata"]["name"] = ns
    binding["spec"]["policyName"] = ns
    here = {"matchLabels": {"kubernetes.io/metadata.name": ns}}  # leave other tests alone
    policy["spec"]["matchConstraints"]["namespaceSelector"] = here
    real.create(policy)
    real.create(binding)
    clients = {"sked": connect(real.kubeconfig()), "user": real.api}

    def said(who: str, method: str, plural: str, name: str, body: dict) -> str:
        if method == "POST":
            make = daemonset if plural == "daemonsets" else schedext
            body, name = merge(make(name, namespace=ns), body), ""
        try:
            path = real.resources[plural].path(ns, name)
            clients[who].request(method, path, body, dryRun="All")
        except sked.ApiError as error:
            return str(error)
        return "accepted"

    for first in (("sked", "DELETE", "daemonsets"), ("user", "POST", "schedexts")):
        # a new policy takes a few seconds to hold
        eventually(lambda first=first: said(*first, "foreign", {}), contains("denied request"))
    yield said
    for plural in ("validatingadmissionpolicies", "validatingadmissionpolicybindings"):
        real.delete(plural, "", ns)


@cases(
    "who, method, plural, name, body, words",
    """
    an edit of a foreign DaemonSet: [sked, PATCH, daemonsets, foreign,
      &edit {metadata: {annotations: {a: b}}}, sked changes only its own DaemonSets]
    our label on a foreign DaemonSet: [sked, PATCH, daemonsets, foreign,
      &label {metadata: {labels: {managed-by: sked-controller}}}, sked changes only its own]
    deleting a foreign DaemonSet:
      [sked, DELETE, daemonsets, foreign, {}, sked deletes no DaemonSets]
    deleting its own: [sked, DELETE, daemonsets, own, {}, sked deletes no DaemonSets]
    one without the label:
      [sked, POST, daemonsets, new, {metadata: {labels: null}}, must have the label managed-by]
    one without an owner:
      [sked, POST, daemonsets, new, {}, must have a SchedExt as its controller]
    one of its own: [sked, POST, daemonsets, new, {metadata: {ownerReferences: [
      {apiVersion: sked.schedkit.io/v1, kind: SchedExt, name: new, uid: u, controller: true}]}},
      accepted]
    an edit of its own: [sked, PATCH, daemonsets, own, *edit, accepted]
    another label on its own: [sked, PATCH, daemonsets, own,
      {metadata: {labels: {managed-by: somebody}}}, must have the label managed-by]
    a lost label put back: [sked, PATCH, daemonsets, "off", *label, accepted]
    an edit of a foreign one by a user: [user, PATCH, daemonsets, foreign, *edit, accepted]
    a new SchedExt with a tag: [user, POST, schedexts, new, {}, pinned by digest]
    another tag: [user, PATCH, schedexts, own, {spec: {sched: scx}}, pinned by digest]
    a tag in place of a digest: [user, PATCH, schedexts, pinned, {spec: {sched: scx}}, pinned by]
    a probe with a tag: [user, PATCH, schedexts, pinned, {spec: {probeImage: sh}}, pinned by]
    a digest in place of a tag: [user, PATCH, schedexts, own, {spec: {sched: PINNED}}, accepted]
    switched off with a tag: [user, PATCH, schedexts, own, {spec: {suspend: true}}, accepted]
    switched on with a tag: [user, PATCH, schedexts, "off", {spec: {suspend: false}}, accepted]
    """.replace("PINNED", PINNED),
)
def test_the_policies_of_install_yaml_and_the_readme_refuse_what_they_should_and_no_more(
    attempt, who, method, plural, name, body, words
):
    assert words in attempt(who, method, plural, name, body)


def test_every_flag_in_the_readme_exists(capsys):
    with pytest.raises(SystemExit):
        sked.main(["--help"])
    known = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    commands = re.findall(r"sked\.py (.*)|`(--[^`]*)`", README)
    named = set(re.findall(r"--[a-z0-9-]+", str(commands)))
    assert {"--help", "--render"} <= named <= known


# ---------------------------------------------------------------- the demo


def test_the_demo_shows_every_act_in_lines_that_fit_a_terminal(world, server, kubelets, capsys):
    kubelets.crash_seconds = (0.2, 0.2, 0.2)
    for name in NODES_OF_THE_DEMO:
        kubelets.add_node(name)
    world.start()
    Demo(server, words_per_second=math.inf).run()
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > 100] == []
    assert "\033" not in shown
    story = ("AllReady", "CrashLoopBackOff", "AllReady", "NotAttached", "AllReady", "scx_lavd")
    for words in (*story, "scx-copied Conflict", "kubectl-edit changed", "Suspended", "AllReady"):
        _, found, shown = shown.partition(words)
        assert found, words  # after those before


DEMO = [sys.executable, "-u", str(HERE / "test_sked.py")]


def test_ctrl_c_ends_the_demo_without_a_traceback():
    with subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as demo:
        assert demo.stdout.readline()
        demo.send_signal(signal.SIGINT)
        shown = demo.communicate(timeout=60)[0].decode()
    assert demo.returncode == 0
    assert "Traceback" not in shown


def test_the_demo_ends_quietly_when_nobody_reads_on(tmp_path):
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(DEMO, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as demo:
        assert demo.stdout.readline()
        demo.stdout.close()
        assert demo.stderr.read() == b""
    assert demo.returncode == 0
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- python test_sked.py

DEMO_SECONDS = 3  # how long a pod has to stay up, instead of 10 s
NODES_OF_THE_DEMO = ("worker-1", "worker-2", "worker-3")
COLOURS = {"AllReady": 32, "Suspended": 32, "RollingOut": 33}  # red: all others


class Demo:
    """Shows sked at work, act by act: what is done, what sked does, and why it matters."""

    def __init__(self, server: ApiServer, words_per_second: float) -> None:
        self.server = server
        self.words_per_second = words_per_second  # how fast people read

    def show(self, text: str, colour: int = 0) -> None:
        in_colour = colour and sys.stdout.isatty()
        print(f"\033[{colour}m{text}\033[0m" if in_colour else text, flush=True)

    def say(self, who: str, text: str, colour: int = 0) -> None:
        """Prints a paragraph after a label; waits until what is not of sked has been read."""
        lines = textwrap.wrap(text, 90, break_on_hyphens=False)
        self.show(f"  {who:6}" + f"\n{' ' * 8}".join(lines), colour)
        if who in ("you", "why"):
            self.pause(len(text.split()))

    def pause(self, words: int) -> None:
        """Waits until so many words have been read."""
        time.sleep(words / self.words_per_second)

    def act(self, title: str) -> None:
        self.show(f"\n{title}", 1)

    def create(self, reason: str, name: str, **spec: Any) -> None:
        obj = schedext(name, **spec)
        self.show(textwrap.indent(yaml.safe_dump(obj, sort_keys=False).strip(), " " * 8))
        self.server.create(obj)
        self.follow(name, reason)

    def edit(self, reason: str, **spec: Any) -> None:
        self.server.patch("schedexts", "default", "scx-rusty", {"spec": spec})
        self.follow("scx-rusty", reason)

    def follow(self, name: str, reason: str) -> None:
        """Prints each new status of a SchedExt until it has this reason."""
        said = []

        def reached(obj: dict) -> bool:
            ready = condition_of(obj, "Ready")
            if ready.get("observedGeneration") != obj["metadata"]["generation"]:
                return False
            line = f"{name} {ready['reason']}: {ready['message']}"
            if line not in said[-1:]:
                said.append(line)
                self.say("sked", line, COLOURS.get(ready["reason"], 31))
            return ready["reason"] == reason

        eventually(lambda: self.server.get("schedexts", "default", name), reached)
        self.pause(6)

    def pods(self) -> None:
        """Prints what runs on each node, and for how long."""
        for pod in sorted(self.server.list("pods", "default"), key=node_of):
            if "deletionTimestamp" not in pod["metadata"]:
                image = pod["spec"]["containers"][0]["image"].rpartition("/")[2]
                age = int(seconds_ago(pod["metadata"]["creationTimestamp"]))
                self.show(f"  node  {node_of(pod)}  {image:18} pod of {age} s")
        self.pause(10)

    def run(self) -> None:
        self.act("1. A scheduler on every node")
        self.say("you", "create a SchedExt, which names an image:")
        self.create("AllReady", "scx-rusty")
        self.pods()
        self.say("why", "You write these few lines. sked makes the privileged DaemonSet.")

        self.act("2. A version that cannot load")
        bad = "ghcr.io/schedkit/scx_rusty:crash"
        self.say("you", f"set sched: {bad}")
        self.edit("NodesFailing", sched=bad)
        self.pods()
        self.say("why", "The update stops at the first node; nobody had to ask for that.")
        self.say("you", "set the old image again:")
        self.edit("AllReady", sched=RUSTY)

        self.act("3. An image that runs but attaches nothing")
        idle = "ghcr.io/schedkit/scx_rusty:idle"
        self.say("you", f"set sched: {idle} and probeImage: busybox:stable")
        self.edit("NodesFailing", sched=idle, probeImage="busybox:stable")
        self.say("why", "To Kubernetes, this pod is fine. The probe asks the kernel.")
        self.say("you", "go back to what ran before:")
        self.edit("AllReady", sched=RUSTY, probeImage=None)

        self.act("4. Another scheduler for one pool of nodes")
        pool = {"pool": "latency"}
        self.say("you", "label worker-3 with pool=latency and create a SchedExt for that pool:")
        self.server.patch("nodes", "", "worker-3", {"metadata": {"labels": pool}})
        self.create("AllReady", "scx-lavd", sched=LAVD, nodeSelector=pool)
        self.follow("scx-rusty", "AllReady")
        self.pods()
        self.say("why", "Only worker-3 has changed hands. The other pods are as old as they were.")

        self.act("5. A second SchedExt for the same nodes")
        self.say("you", "create one that has no nodeSelector, as scx-rusty has none:")
        self.create("Conflict", "scx-copied", sched=LAVD)
        self.pods()
        self.say("why", "Two schedulers never race for a node. The older SchedExt keeps its nodes.")
        self.server.delete("schedexts", "default", "scx-copied")

        self.act("6. Somebody edits the DaemonSet")
        self.say("you", "set another image in the DaemonSet itself, with kubectl edit:")
        containers = pod_spec(self.server.get("daemonsets", "default", "scx-rusty"))["containers"]
        containers[0]["image"] = "evil/image:1"
        path = BUILT_IN["daemonsets"].path("default", "scx-rusty")
        edit = in_template(containers=containers)
        self.server.call("PATCH", f"{path}?fieldManager=kubectl-edit", edit)
        said = eventually(lambda: drift_events(self.server))
        self.say("sked", f"DriftUndone: {said[0]}", 33)
        self.say("", f"The image is {images(self.server)['scx-rusty']} again.")
        self.say("why", "What runs privileged on your nodes is what the SchedExt says.")

        self.act("7. The off switch")
        self.say("you", "set suspend: true")
        self.edit("Suspended", suspend=True)
        self.pods()
        self.say("why", "The nodes are back on the kernel's own scheduler. And on again:")
        self.edit("AllReady", suspend=False)


def demonstrate(server: ApiServer) -> None:
    logging.disable()
    sked.SETTLE_SECONDS = float(DEMO_SECONDS)
    server.set_default("minReadySeconds", DEMO_SECONDS)
    kubelets = Kubelets(server)
    kubelets.crash_seconds = (1.0, 2.0, 1.0)
    for name in NODES_OF_THE_DEMO:
        kubelets.add_node(name)
    operator = sked.Operator(connect(server.kubeconfig("sked")))
    threading.Thread(target=operator.run, daemon=True).start()
    demo = Demo(server, words_per_second=5.0)
    demo.show("sked in seven acts, with an API server and three nodes that this file plays.")
    demo.show(f"A pod is ready when it has stayed up for 10 s. Here {DEMO_SECONDS} s are enough.")
    demo.run()
    demo.show("\nDone. To install sked on a cluster, see README.md.")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may have had it ignored
    try:
        with ApiServer() as played:
            demonstrate(played)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # nobody reads on, as in: python test_sked.py | head -3
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
