# SPDX-License-Identifier: Apache-2.0
"""Run sched_ext schedulers on Kubernetes nodes: one SchedExt in, one DaemonSet out.

    API server --watch--> Reflector --key--> WorkQueue --> worker --> reconcile
    reconcile: what we want -> create or patch the DaemonSet -> build_status -> patch the status

A Go operator's reconcile takes 60 lines, because controller-runtime supplies the rest. This file is
both. The operator is in the sections pods, reconcile, what sked remembers, the DaemonSet, what
differs, placement, status. The library's share is in the others: the API server, watching, the
queue, the lease, health and metrics, the command line.

Why not the kubernetes package's informer and leader election? Its informer fails on custom
resources and does not say when it is filled, and its leader election goes by the wall clock and
never releases the lease. Its typed API classes cost up to 27 MiB and drop fields that they do not
know, so only its configuration, its connection pool and two helpers are used.

Why not server-side apply? It cannot say that a field must be absent: a command, hostPID or a
container that another client adds to a privileged pod would stay. So sked compares and removes it.

Throughout this file:
    schedext   a SchedExt, as the plain dict that the API returns
    daemonset  a DaemonSet, likewise
    pod        the few facts that sked keeps about a scheduler's pod
    key        (namespace, name) of a SchedExt, and so of its DaemonSet
    selector   the pairs of a nodeSelector, as a set. A superset of another one is more specific,
               and wins the nodes that both select
    placement  a DaemonSet's nodeSelector and node affinity: which nodes it runs on
    parked     a DaemonSet whose last change affected only its placement. Its strategy is OnDelete
               until another change, so that the pods on the nodes it keeps do not restart

Three rules keep it simple:
    Only keys travel through the queue. reconcile reads the caches and never asks what woke it.
    Each cache has one writer, its reflector. What sked writes comes back through the watch.
    sked does not act on a DaemonSet older than its own last write, and never deletes anything.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import gc
import hashlib
import http.server
import json
import logging
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
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timezone
from math import ceil, inf
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import urllib3
import yaml
from kubernetes import config as kubeconfig
from kubernetes.client import Configuration
from kubernetes.client.rest import RESTClientObject
from kubernetes.utils.keepalive import tcp_keepalive_socket_options
from kubernetes.utils.quantity import parse_quantity
from urllib3.exceptions import HTTPError, SSLError

__version__ = "1.3.0"

Key = tuple[str, str]
Selector = frozenset  # of pairs

GATHER_SECONDS = 1.0  # changes are batched for this long before a status is written
BLOCKED_SECONDS = 60.0  # how soon we look again at what only someone else can fix

log = logging.getLogger("sked")


def backoff(failures: int, most: float) -> float:
    """Seconds to wait after this many failures in a row: about 1, 2, 4, ..."""
    doublings = min(failures - 1, 20)
    return min(most, 2.0**doublings) * random.uniform(0.75, 1.0)


def timestamp(style: str = "%Y-%m-%dT%H:%M:%SZ") -> str:
    """Now, as the API writes it."""
    return datetime.now(timezone.utc).strftime(style)


def unix_time(stamp: str) -> float:
    """A timestamp of the API, in seconds."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def key_of(obj: dict) -> Key:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def controller_of(obj: dict) -> dict:
    owners = obj["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), {})


def spawn(run: Callable, name: str) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


# ---------------------------------------------------------------- the API server

SCHEDEXTS = "/apis/sked.schedkit.io/v1{}/schedexts"
DAEMONSETS = "/apis/apps/v1{}/daemonsets"
PODS = "/api/v1{}/pods"
EVENTS = "/api/v1{}/events"
LEASES = "/apis/coordination.k8s.io/v1{}/leases"

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 30.0  # for everything but a watch
WATCH_SECONDS = 240  # after this the API server ends a watch
RECONNECT_SECONDS = 8.0  # the longest wait between attempts to reach an API server that is down
FIELD_MANAGER = "sked"  # our name in managedFields: the API server takes it from the User-Agent
HEADER_SECONDS = 1.0  # credentials are kept for this long: the package is slow to read them
POOL_CONNECTIONS = 12  # more than the threads that usually talk to the API server


def path_to(resource: str, namespace: str, *names: str) -> str:
    scope = f"/namespaces/{namespace}" if namespace else ""
    return "/".join([resource.format(scope), *names])


class ApiError(Exception):
    """The API server refused (its HTTP status) or gave no usable answer (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def is_outage(self) -> bool:
        """Whether the API server is down: a load balancer in front of it then says 502 to 504."""
        return self.status in (0, 502, 503, 504)


SETUP_OR_NETWORK_ERRORS = (
    HTTPError,
    OSError,
    ValueError,
    yaml.YAMLError,
    kubeconfig.ConfigException,
)


class Api:
    """Plain dicts to and from the API server; whatever goes wrong is an ApiError."""

    def __init__(self, configure: Callable) -> None:
        self.configure = configure
        self.lock = threading.Lock()
        self.connect()

    def connect(self) -> None:
        """Read the configuration, and forget all connections and credentials."""
        self.configuration = self.configure()
        self.configuration.connection_pool_maxsize = POOL_CONNECTIONS
        self.configuration.socket_options = tcp_keepalive_socket_options(30, 10, 3)
        manager = RESTClientObject(self.configuration).pool_manager
        manager.connection_pool_kw["ssl_context"] = client_tls(self.configuration)
        for option in ("ca_certs", "ca_cert_data", "cert_file", "key_file"):
            manager.connection_pool_kw.pop(option, None)  # else each connection loads them again
        self.host = self.configuration.host.rstrip("/")
        # The manager would look up the host's connections again for every request.
        self.pool = manager.connection_from_url(self.host)
        is_plain_proxy = self.pool.proxy and self.host.startswith("http:")
        # Every path starts with this. A proxy for plain HTTP needs the whole URL.
        self.prefix = self.host if is_plain_proxy else urlsplit(self.host).path
        self.header_read_at = -inf
        # True once our credentials or certificates are out of date. This line is the last one: if
        # another fails, the next request connects again.
        self.must_connect = False

    def authorization(self) -> dict:
        """The header that says who we are. It may change: a file or a plugin renews the token."""
        with self.lock:
            if self.must_connect:
                self.connect()
            if monotonic() > self.header_read_at + HEADER_SECONDS:
                self.header = self.read_header()
                self.header_read_at = monotonic()
            return self.header

    def read_header(self) -> dict:
        setting = self.configuration.auth_settings().get("BearerToken")
        if setting and setting["value"]:
            return {"Authorization": setting["value"]}
        if self.host.startswith("https:") and not self.configuration.cert_file:
            self.must_connect = True
            raise ValueError("the kubeconfig gives no credentials: its plugin may be failing")
        return {}

    def get(self, path: str, timeout: float | None = None) -> dict | None:
        """An object, or None if it does not exist."""
        try:
            return self.request("GET", path, timeout=timeout)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def request(
        self,
        method: str,
        path: str,
        body: dict | None = None,
        timeout: float | None = None,
        **query: Any,
    ) -> dict:
        """The JSON that the API server answers. The timeout is REQUEST_SECONDS by default."""
        with self.open(method, path, body, timeout or REQUEST_SECONDS, query) as response:
            return json.loads(response.data)

    def watch(self, path: str, **query: Any) -> Iterator[dict]:
        """The events of a watch. The first one is empty and says that the watch is open.

        Errors in here become an ApiError; errors in the caller's loop do not.
        """
        query |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": WATCH_SECONDS}
        with self.open("GET", path, None, WATCH_SECONDS + REQUEST_SECONDS, query) as response:
            yield {}
            for line in response:
                yield json.loads(line)

    @contextmanager
    def open(
        self, method: str, path: str, body: dict | None, timeout: float, query: dict
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """The response to a successful request. An error while reading it is an ApiError, too."""
        kind = "merge-patch+json" if method == "PATCH" else "json"
        headers = {
            "Content-Type": f"application/{kind}",
            "User-Agent": f"{FIELD_MANAGER}/{__version__}",
        }
        try:
            headers |= self.authorization()  # first: it may replace the pool
            response = self.pool.urlopen(
                method,
                f"{self.prefix}{path}?{urlencode(query)}",
                body=json.dumps(body) if body else None,
                headers=headers,
                retries=False,
                assert_same_host=False,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, total=timeout),
                preload_content=False,
            )
            METRICS.requested(method, response.status)
            with closing(response):
                if response.status >= 300:
                    raise self.refusal(response)
                yield response
        except SETUP_OR_NETWORK_ERRORS as error:
            METRICS.requested(method, 0)
            if isinstance(error, SSLError):
                self.must_connect = True
            # without the details that vary, so that the same fault is logged once
            cause = str(error).partition(". (")[0]
            raise ApiError(0, f"cannot talk to the API server: {cause}") from error

    def refusal(self, response: urllib3.BaseHTTPResponse) -> ApiError:
        if response.status == 401:
            self.must_connect = True
        text = response.data.decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["message"]
        if response.status == 401:
            text += ": the token or certificate is wrong or has expired; log in again"
        return ApiError(response.status, text or f"HTTP status {response.status}")


def client_tls(configuration: Configuration) -> ssl.SSLContext:
    """One context for all connections. urllib3 would load the certificates again for each of them,
    and Python crashes when several threads do that at once."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # it refuses some hosted clusters
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


# ---------------------------------------------------------------- watching

OURS = {"managed-by": "sked-controller"}  # the label of every DaemonSet and pod that sked makes
PAGE_ITEMS = 100  # in each page of a list


class Reflector(dict):
    """A cache of one resource, by key, that follows the API server.

    Each subclass has a RESOURCE and a method changed(old, new), which queues the keys that a change
    concerns. None stands for an object that does not exist.
    """

    QUERY = {"labelSelector": "managed-by=sked-controller"}

    def __init__(self, operator: Operator, namespace: str) -> None:
        self.operator = operator
        self.path = path_to(self.RESOURCE, namespace)
        self.name = self.path.rpartition("/")[2]
        self.groups = defaultdict(dict)  # by group, then by key
        self.filled = threading.Event()

    def keep(self, obj: dict) -> Any:
        """What the cache keeps of an object."""
        obj["metadata"].pop("managedFields", None)
        obj = with_shared_names(obj)
        obj.pop("apiVersion", None)  # a watch has these two, a list does not, and we know them
        obj.pop("kind", None)
        for part in ("spec", "status"):
            if not isinstance(obj.get(part), dict):  # a lax CRD may allow anything
                obj[part] = {}
        return obj

    def group_of(self, item: Any) -> Any:
        """The group in which an item can be found, too."""
        return ""

    def select(self, group: Any) -> list:
        return list(self.groups.get(group, {}).values())

    def run(self) -> None:
        version = ""
        short_watches = 0  # in a row
        while not self.operator.stop.is_set():
            started = monotonic()
            try:
                version = self.follow(version or self.fill())
            except ApiError as error:
                version = ""  # list again
                if error.status not in (404, 410):  # these are no fault: the next list will tell
                    self.operator.fault(self.name, str(error))
            except Exception:
                version = ""
                log.exception("%s: unexpected error in the watch loop", self.name)
            if monotonic() > started + RECONNECT_SECONDS:
                short_watches = 0
                continue
            # A watch that did not last counts as a failure: some proxies end each watch at once.
            short_watches += 1
            self.operator.stop.wait(backoff(short_watches, RECONNECT_SECONDS))

    def fill(self) -> str:
        """List everything into the cache. Returns the version to watch from."""
        items = {}
        query = self.QUERY | {"limit": PAGE_ITEMS}
        more = True
        while more:
            self.operator.beat()
            try:
                page = self.operator.api.request("GET", self.path, **query)
            except ApiError as error:
                if error.status != 404:
                    raise
                self.store({key: None for key in self})  # without the CRD there are no SchedExts
                raise ApiError(
                    0,
                    f"the API server has no {self.name}: "
                    "install the CRD with 'kubectl apply -f install.yaml'",
                ) from None
            for obj in page.get("items") or ():
                items[key_of(obj)] = self.keep(obj)
            more = query["continue"] = page["metadata"].get("continue")
        deleted = {key: None for key in self.keys() - items.keys()}
        self.store(items | deleted)
        self.filled.set()
        return page["metadata"]["resourceVersion"]

    def follow(self, version: str) -> str:
        """Watch from a version on. Returns the last version seen.

        Empty, which makes run list again, if not even a bookmark came: that is how some servers
        answer a version from before they were restored from a backup.
        """
        last = ""
        for event in self.operator.api.watch(self.path, **self.QUERY, resourceVersion=version):
            self.operator.beat()
            if event:
                last = self.handle(event)
            else:  # the watch is open
                self.operator.recovered(self.name)
        return last

    def handle(self, event: dict) -> str:
        """Apply one event of a watch. Returns its version."""
        kind, obj = event["type"], event["object"]
        if kind == "ERROR":
            raise ApiError(obj["code"], obj["message"])
        if kind != "BOOKMARK":
            self.store({key_of(obj): None if kind == "DELETED" else self.keep(obj)})
        return obj["metadata"]["resourceVersion"]

    def store(self, items: dict) -> None:
        """Keep all of them (None: deleted), then queue what changed."""
        changes = [(key, self.get(key), item) for key, item in items.items()]
        for change in changes:
            self.put(*change)
        for _, old, new in changes:
            if old != new:
                self.changed(old, new)

    def put(self, key: Key, old: Any, new: Any) -> None:
        """Add before removing, so that a reader always finds the old item or the new one."""
        if new:
            self[key] = self.groups[self.group_of(new)][key] = new
        else:
            self.pop(key, None)
        if old and not (new and self.group_of(old) == self.group_of(new)):
            former = self.groups[self.group_of(old)]
            del former[key]
            if not former:
                del self.groups[self.group_of(old)]


class SchedExts(Reflector):
    RESOURCE = SCHEDEXTS
    QUERY = {}

    def group_of(self, schedext: dict) -> Selector:
        return selector_of(schedext)

    def changed(self, old: dict | None, new: dict | None) -> None:
        """Queue the SchedExt and, if its selector is new or gone, those that yield to it."""
        self.operator.queue.add(key_of(new or old))
        selectors = {selector_of(item) for item in (old, new) if item}
        if (old and new and len(selectors) == 1) or not self.filled.is_set():
            return  # nobody else is concerned, or the first list queues everybody
        # The losers leave a new winner's nodes at once, so that it finds the kernel free. They wait
        # a moment before they return to the nodes of a deleted one: its pods may end by then.
        delay = 0.0 if new else GATHER_SECONDS
        for loser in list(self.groups):
            if any(loser < selector for selector in selectors):
                for schedext in self.select(loser):
                    self.operator.queue.add(key_of(schedext), delay)


class DaemonSets(Reflector):
    RESOURCE = DAEMONSETS

    def keep(self, obj: dict) -> dict:
        """The object with the name of its last editor, but without managedFields."""
        editor = last_editor(obj["metadata"].get("managedFields") or ())
        return super().keep(obj) | {"lastEditor": editor}

    def changed(self, old: dict | None, new: dict | None) -> None:
        """Queue its SchedExt: at once after an edit, to undo it soon. Everything else can wait,
        deletion included: the SchedExt may be gone as well, and its watch may not have said so."""
        is_edit = bool(old and new) and old["spec"] != new["spec"]
        self.operator.queue.add(key_of(new or old), 0.0 if is_edit else GATHER_SECONDS)


def with_shared_names(value: Any) -> Any:
    """A copy in which each name of a field is in memory once: every event brings its own strings.

    With thousands of SchedExts, this saves a quarter of what the caches take.
    """
    if isinstance(value, dict):
        return {sys.intern(name): with_shared_names(item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_shared_names(item) for item in value]
    return value


def last_editor(managed_fields: Iterable[dict]) -> str:
    """Who last changed an object, apart from sked and the writers of its status; may be empty."""
    edits = [
        (entry.get("time", ""), entry["manager"])
        for entry in managed_fields
        if entry.get("manager") not in (None, FIELD_MANAGER) and not entry.get("subresource")
    ]
    return max(edits, default=("", ""))[1]


# ---------------------------------------------------------------- pods

SCX, PROBE = "scx", "probe"  # the containers that sked puts into a pod
CRASHED = "CrashLoopBackOff"  # also used for a container that crashed and is running again
# How long a pod must stay up before it counts as ready: one that cannot attach looks ready for two
# seconds at every try.
SETTLE_SECONDS = 10.0
CANNOT_RUN = (126, 127, 128)  # exit codes: the shell or the container runtime found no program

Problem = tuple[str, str]  # reason and message, two empty strings if there is none


class Pod(NamedTuple):
    """What sked keeps of a pod. If two are equal, nothing has changed that sked cares about."""

    key: Key  # of its DaemonSet, and so of its SchedExt
    daemonset_uid: str
    name: str
    node: str
    revision: str  # of the template that it was made from
    template_generation: str  # of the DaemonSet when it was made
    started: str  # when its containers started, by the node's clock; empty unless all of them run
    is_up: bool  # all of sked's containers are running and ready
    since: float  # when it came up, by monotonic(); infinite until it does
    reason: str  # of its last failure, even if it is up again
    message: str

    def settles_in(self, now: float, settle: float) -> float:
        """Seconds until it has been up for long enough; infinite until it comes up."""
        return self.since + settle - now

    def fails(self, now: float, settle: float) -> bool:
        """After a failure it fails until it settles, so a crash loop is one steady failure."""
        return bool(self.reason) and self.settles_in(now, settle) > 0


class Pods(Reflector):
    RESOURCE = PODS

    def keep(self, obj: dict) -> Pod | None:
        """None if the pod is on its way out: it may run for a while, but no longer counts."""
        if "deletionTimestamp" in obj["metadata"]:
            return None
        old = self.get(key_of(obj))
        try:
            return read_pod(obj, old)
        except Exception:  # a pod that we cannot read must not stop the others
            log.exception("%s/%s: unexpected error in reading this pod", *key_of(obj))
            return old

    def group_of(self, pod: Pod) -> str:
        return pod.daemonset_uid

    def changed(self, old: Pod | None, new: Pod | None) -> None:
        self.operator.queue.add((new or old).key, GATHER_SECONDS)


def read_pod(obj: dict, old: Pod | None) -> Pod:
    """The facts about a pod, given what we knew of it before."""
    meta, spec, status = obj["metadata"], obj["spec"], obj["status"]
    owner = controller_of(obj)
    statuses = status.get("containerStatuses", ())
    ours = {c["name"]: c for c in statuses if c["name"] in (SCX, PROBE)}
    starts = [c["state"].get("running", {}).get("startedAt") for c in ours.values()]
    started = max(starts) if starts and all(starts) else ""
    is_up = bool(started) and all(c["ready"] for c in ours.values())
    reason, message = pod_problem(meta, status, ours)
    return Pod(
        key=(meta["namespace"], owner.get("name", "")),
        daemonset_uid=owner.get("uid", ""),
        name=meta["name"],
        node=spec.get("nodeName") or target_node(spec),
        revision=meta["labels"].get("controller-revision-hash", ""),
        template_generation=meta["labels"].get("pod-template-generation", ""),
        started=started,
        is_up=is_up,
        since=up_since(started, is_up, old),
        reason=reason,
        message=message,
    )


def up_since(started: str, is_up: bool, old: Pod | None) -> float:
    """When a pod came up, by monotonic(); infinite if these containers never did."""
    if old and old.started == started and old.since < inf:
        # Also if it is unready for a moment, as it is when the kubelet restarts.
        return old.since
    if not is_up:
        return inf
    if old:
        # We saw it come up, and the node's clock may be wrong.
        return monotonic()
    # It was up before we looked: a restart of sked changes nothing.
    return monotonic() - max(0.0, time.time() - unix_time(started))


def target_node(spec: dict) -> str:
    """The node that a DaemonSet's pod is meant for before it is bound."""
    with suppress(KeyError, IndexError):
        rules = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return rules["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
    return ""


def pod_problem(meta: dict, status: dict, containers: dict) -> Problem:
    """What is wrong with a pod, or was before its containers restarted."""
    if status.get("reason"):  # it was evicted, for instance
        return status["reason"], status.get("message", "")
    for state in status.get("conditions") or ():
        if state.get("reason") == "Unschedulable":
            return "Unschedulable", state.get("message", "")
    logs = f"kubectl logs -n {meta['namespace']} {meta['name']}"
    scx, probe = containers.get(SCX, {}), containers.get(PROBE, {})
    reason, message = container_problem(scx, logs)
    if reason and not had_settled(scx, probe):
        return reason, message
    return probe_problem(probe, logs)


def container_problem(container: dict, logs: str) -> Problem:
    waiting = container.get("state", {}).get("waiting", {})
    died = last_end(container)
    restarts = container.get("restartCount", 0)
    reason = waiting.get("reason", CRASHED if died or restarts else "")
    if reason in ("ContainerCreating", "PodInitializing"):
        return "", ""
    if reason != CRASHED:
        return reason, waiting.get("message", "")
    message = f"exit code {died.get('exitCode', 'unknown')}"
    if died.get("reason", "Error") != "Error":
        message += f" ({died['reason']})"
    message += f", {restarts} restart{'' if restarts == 1 else 's'}"
    if words := last_words(died):
        message += f": {words}"
    return CRASHED, f"{message}; see '{logs}{' --previous' if restarts else ''}'"


def probe_problem(probe: dict, logs: str) -> Problem:
    """The probe ends when no scheduler is attached, unless it could not run at all."""
    reason, message = container_problem(probe, f"{logs} -c {PROBE}")
    died = last_end(probe)
    if reason == CRASHED and died.get("exitCode") not in CANNOT_RUN:
        return "NotAttached", f"{last_words(died) or 'no scheduler is attached'}; see '{logs}'"
    if reason:
        message = f"the probe does not run (its image needs sh and grep): {message}"
    return reason, message


def had_settled(scx: dict, probe: dict) -> bool:
    """Whether scx had stayed up when the probe ended, so that an earlier crash does not matter."""
    started = scx["state"].get("running", {}).get("startedAt")
    ended = last_end(probe).get("finishedAt")  # null if the kubelet lost the container
    if not started or not ended:
        return False
    return unix_time(ended) - unix_time(started) > SETTLE_SECONDS


def last_end(container: dict) -> dict:
    """How a container ended, if it ever did."""
    states = container.get("lastState", {}) | container.get("state", {})
    return states.get("terminated", {})


def last_words(died: dict) -> str:
    return " ".join(died.get("message", "").split())[-300:]


# ---------------------------------------------------------------- the queue

RETRY_SECONDS = 300.0  # the longest wait before retrying what fails, or what others keep undoing


class WorkQueue:
    """Keys to work on. A key is queued at most once, and only one worker has it at a time."""

    def __init__(self) -> None:
        self.due = {}  # when, by key
        self.busy = set()
        self.failures = Counter()  # in a row, by key
        self.closed = False
        self.condition = threading.Condition()

    def add(self, key: Key, after: float = 0.0) -> None:
        """Work on a key after this many seconds (inf: never), or sooner if it is due sooner."""
        with self.condition:
            when = monotonic() + after
            if when < self.due.get(key, inf) and not self.closed:
                self.due[key] = when
                self.condition.notify()

    def get(self, timeout: float) -> Key | None:
        """A key that is due. If none is, wait for a change or the timeout, and return None."""
        with self.condition:
            now = monotonic()
            wait = timeout
            for key, when in self.due.items():
                if key not in self.busy:
                    if when <= now:
                        del self.due[key]
                        self.busy.add(key)
                        self.condition.notify()  # wake another worker to wait for the next key
                        return key
                    wait = min(wait, when - now)
            self.condition.wait(wait)
            return None

    def succeeded(self, key: Key, look_again: float) -> None:
        self.failures.pop(key, None)
        self.done(key, look_again)

    def failed(self, key: Key, longest_wait: float) -> None:
        """Work on the key again, later each time."""
        self.failures[key] += 1
        self.done(key, backoff(self.failures[key], longest_wait))

    def done(self, key: Key, look_again: float) -> None:
        with self.condition:
            self.busy.remove(key)
            self.add(key, look_again)
            self.condition.notify()  # the key may be due again, or close() may be waiting

    def attempts(self, key: Key) -> int:
        """How often a key has failed in a row."""
        return self.failures[key]

    def depth(self) -> int:
        """How many keys wait for a worker."""
        with self.condition:
            now = monotonic()
            return sum(when <= now for when in self.due.values())

    def close(self, timeout: float) -> bool:
        """Hand out no more keys. Returns whether all work on them ends within the timeout."""
        with self.condition:
            self.closed = True
            self.due.clear()
            self.condition.notify_all()
            return self.condition.wait_for(lambda: not self.busy, timeout)


# ---------------------------------------------------------------- reconcile

WORKERS = 4  # enough to hide the API server's latency
STUCK_SECONDS = 360.0  # a thread that shows no sign of life for this long is stuck
FINISH_SECONDS = 0.8  # for the work under way when we are told to stop
EVENT_SECONDS = 0.9  # for sending an event, so that one that hangs does not delay the status
PATIENCE = 4  # after more failures in a row than this, even what may pass is reported


class Blocked(Exception):
    """Why the DaemonSet cannot be written, or not yet: reason and message for the status."""

    def __init__(self, reason: str, message: str, look_again: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        # after this many seconds
        self.look_again = BLOCKED_SECONDS if look_again is None else look_again


class SchedExtGone(Exception):
    """The SchedExt in the cache no longer exists."""


class Operator:
    """The caches, the queue, and the work on one key."""

    def __init__(self, api: Api, namespace: str = "", elector: Elector | None = None) -> None:
        self.api = api
        self.elector = elector
        self.stop = threading.Event()
        self.queue = WorkQueue()
        self.histories = defaultdict(History)  # by key
        self.beats = {}  # the last sign of life, by thread
        self.faults = {}  # failures to reach the API server, by reflector or key
        self.refusals = {}  # the last refusal that was logged, by key
        self.lock = threading.Lock()
        self.schedexts = SchedExts(self, namespace)
        self.daemonsets = DaemonSets(self, namespace)
        self.pods = Pods(self, namespace)
        self.reflectors = (self.schedexts, self.daemonsets, self.pods)

    def run(self) -> None:
        """Work until stop is set."""
        self.start()
        self.stop.wait()
        self.queue.close(FINISH_SECONDS)

    def start(self) -> None:
        for reflector in self.reflectors:
            spawn(reflector.run, reflector.name)
        for n in range(WORKERS):
            spawn(self.work, f"worker-{n}")

    def is_ready(self) -> bool:
        return all(reflector.filled.is_set() for reflector in self.reflectors)

    def leads(self) -> bool:
        return not self.elector or self.elector.leads()

    def beat(self) -> None:
        """A sign of life of the thread that calls it."""
        self.beats[threading.current_thread()] = monotonic()

    def silent_threads(self) -> list:
        oldest = monotonic() - STUCK_SECONDS
        beats = self.beats.copy()
        return sorted(t.name for t in beats if beats[t] < oldest or not t.is_alive())

    def fault(self, who: str, message: str) -> None:
        """Log why a reflector or a key cannot reach the API server, unless it is known already."""
        with self.lock:
            if message not in self.faults.values():
                log.warning("%s; trying again", message)
            self.faults[who] = message

    def recovered(self, who: str) -> None:
        """Note that a reflector or a key reaches the API server again, and log it once all do."""
        with self.lock:
            if self.faults.pop(who, None) and not self.faults:
                log.info("the API server answers again")

    def work(self) -> None:
        while not self.is_ready() and not self.stop.is_set():
            for reflector in self.reflectors:
                reflector.filled.wait(1.0)
        while not self.stop.is_set():
            self.beat()
            if key := self.queue.get(timeout=REQUEST_SECONDS):
                self.process(key)

    def process(self, key: Key) -> None:
        """Reconcile a key and queue it again. All errors end here."""
        started = monotonic()
        who = "/".join(key)
        result = "error"
        try:
            look_again = self.reconcile(key)
        except ApiError as error:
            if error.is_outage():  # logged once, however many keys it affects
                self.fault(who, str(error))
                self.queue.failed(key, RECONNECT_SECONDS)
            else:
                self.recovered(who)
                if self.refused(key, error):
                    result = "requeue"
                self.queue.failed(key, RETRY_SECONDS)
        except Exception:
            log.exception("%s: unexpected error", who)
            self.queue.failed(key, RETRY_SECONDS)
        else:
            result = "success"
            self.recovered(who)
            self.refusals.pop(key, None)
            self.queue.succeeded(key, look_again)
        METRICS.reconciled(result, monotonic() - started)

    def refused(self, key: Key, error: ApiError) -> bool:
        """Log a refusal, once. Returns whether it should pass, because only a cache was behind."""
        is_cache_behind = error.status in (404, 409)
        should_pass = is_cache_behind and self.queue.attempts(key) < PATIENCE
        if not should_pass and self.refusals.get(key) != str(error):
            self.refusals[key] = str(error)
            log.warning("%s/%s: %s; trying again", *key, error)
        return is_cache_behind

    def reconcile(self, key: Key) -> float:
        """Make the DaemonSet and the status of one SchedExt what they should be.

        A pass writes the DaemonSet or the status, never both. Returns the seconds until another
        look is due.
        """
        schedext = self.schedexts.get(key)
        if not schedext or "deletionTimestamp" in schedext["metadata"]:
            # There is no finalizer: the owner reference makes the garbage collector clean up.
            if self.histories.pop(key, None):
                log.info("%s/%s: deleted; the garbage collector will delete its DaemonSet", *key)
            return inf
        blocked = None
        daemonset = self.daemonsets.get(key)  # what the status describes if apply raises
        try:
            daemonset, wrote = self.apply(key, schedext)
            if wrote:
                return GATHER_SECONDS  # the status follows when the controller has had a moment
        except SchedExtGone:
            return BLOCKED_SECONDS  # the watch will say so sooner
        except Blocked as error:
            blocked = error  # the status says why, and we look again
        except InvalidSpec as error:
            # Waiting does not mend it, but an edit does, or the end of a pool that it yields to.
            blocked = Blocked("Rejected", str(error))
        except ApiError as error:
            # A refusal, or a fault that does not pass, belongs in the status. An outage ends by
            # itself. A namespace that is being deleted refuses everything, and its SchedExts are
            # about to go.
            is_refusal = error.status in (400, 403, 422)
            is_lasting = is_refusal or self.queue.attempts(key) > PATIENCE
            if not is_lasting or error.is_outage() or "is being terminated" in str(error):
                raise
            blocked = Blocked("Rejected", f"cannot apply the DaemonSet: {str(error)[:1000]}")
        view = self.look(key, schedext, daemonset or NO_DAEMONSET)
        status = build_status(view, blocked, timestamp())
        if status != schedext["status"]:
            early = self.histories[key].status_due_in()
            if early > 0:
                return early  # so that a rollout does not write the status for every pod
            self.write_status(key, schedext, status)
        return max(GATHER_SECONDS, next_change_in(view, blocked))  # not at once: no busy loop

    def apply(self, key: Key, schedext: dict) -> tuple[dict, bool]:
        """The DaemonSet, and whether it has just been created or patched.

        Raises Blocked if it must not be written now, InvalidSpec if there can be none, SchedExtGone
        if the SchedExt no longer exists, and ApiError if the API server refuses or does not answer.
        """
        history = self.histories[key]
        want = owned_fields(schedext, list(self.schedexts.groups))  # by selector
        have = self.cached_or_fetched(key, schedext)
        if have:
            check_control(schedext, have)  # what is not ours is never touched
        target, changes = as_wanted(have, want)
        if have and changes:
            # Pods that run what is wanted need not restart on the nodes that they keep.
            pods = self.pods.select(have["metadata"]["uid"])
            want = parked_if_possible(want, have, changes, pods, history)
            target, changes = as_wanted(have, want)
        is_drift = history.is_drift(want, have)  # if anything differs
        if is_drift and history.is_untouched(have):
            # The spec is as our own write left it, so admission made this of it: accepted.
            target["spec"] = have["spec"]
            changes = outside_spec(changes)
        if not changes:
            # Remembered although we wrote nothing, so that a later difference counts as an edit
            # also after a restart of sked.
            history.remember(want, have)
            return have, False
        if is_drift:
            history.check_pace(drift_sentence(have, changes))  # it may be a fight
        if have:
            patch = merge_patch(have, target, guard_for(changes, is_drift))
            answer = self.write("PATCH", path_to(DAEMONSETS, *key), patch)
        else:
            answer = self.write("POST", path_to(DAEMONSETS, key[0]), target)
        history.wrote_daemonset(want, have, answer)
        _, overruled = as_wanted(answer, want)
        if overruled and history.is_untouched(answer):
            paths = ", ".join(overruled)
            log.info("%s/%s: admission changed %s of the DaemonSet; sked accepts that", *key, paths)
        took_effect = [path for path in changes if path not in overruled]
        if not took_effect and generation_of(answer) > generation_of(have):
            took_effect = list(changes)  # the spec did change, though not to what we asked for
        if took_effect and is_drift:
            repairs = history.repaired()
            self.report_drift(key, schedext, drift_sentence(have, took_effect), repairs)
        elif took_effect:
            what = f"changed {', '.join(took_effect)} of" if have else "created"
            log.info("%s/%s: %s the DaemonSet", *key, what)
        return answer, True

    def cached_or_fetched(self, key: Key, schedext: dict) -> dict:
        """The DaemonSet, or {} if there is none.

        Usually the cache knows. We ask the API server after a failure, when the cache is older than
        our own last write, when a DaemonSet that we made is missing (it may only have lost our
        label), and when it has no owner. If it is then to be created or adopted, we make sure that
        the SchedExt still exists: its deletion may not have reached the watch.
        """
        history = self.histories[key]
        found = self.daemonsets.get(key)
        if found:
            is_doubtful = not controller_of(found) or history.is_ahead_of(found)
        else:
            is_doubtful = bool(schedext["status"]) or history.had_daemonset()
        if not is_doubtful and not self.queue.attempts(key):
            return found or {}
        found = self.api.get(path_to(DAEMONSETS, *key))
        if not found or not controller_of(found):
            self.check_existence(key, schedext)
        return self.daemonsets.keep(found) if found else {}

    def check_existence(self, key: Key, schedext: dict) -> None:
        """Raise SchedExtGone if the SchedExt has been deleted, or is another one by now."""
        found = self.api.get(path_to(SCHEDEXTS, *key))
        there = found["metadata"] if found else {}
        if there.get("uid") != schedext["metadata"]["uid"] or "deletionTimestamp" in there:
            raise SchedExtGone

    def report_drift(self, key: Key, schedext: dict, drift: str, repairs: int) -> None:
        """Log a repair and send an event, until it is a fight: then the status tells about it."""
        if repairs > QUICK_REPAIRS + 1:
            return
        message = f"{drift}; sked has reverted it"
        if repairs > QUICK_REPAIRS:
            message += f" {repairs} times and is backing off"
        log.warning("%s/%s: %s", *key, message)
        self.send_event(schedext, "DriftUndone", message)

    def look(self, key: Key, schedext: dict, daemonset: dict) -> View:
        """What build_status needs to know."""
        now = monotonic()
        if controller_of(daemonset).get("uid") != schedext["metadata"]["uid"]:
            daemonset = NO_DAEMONSET
        settle = max(SETTLE_SECONDS, daemonset["spec"].get("minReadySeconds", 0))
        pods = self.pods.select(daemonset["metadata"]["uid"])
        up = [pod for pod in pods if pod.is_up]
        waits = [pod.settles_in(now, settle) for pod in up]
        failing = [pod for pod in pods if pod.fails(now, settle)]
        desired, current = number(daemonset, DESIRED), number(daemonset, CURRENT)
        counts = (desired, current, number(daemonset, UPDATED))
        was_failing = condition(schedext["status"], "Ready").get("reason") == "NodesFailing"
        steady = self.histories[key].note_counts(counts, was_failing)
        return View(
            schedext=schedext,
            daemonset=daemonset,
            pods=pods,
            failing=failing,
            rivals=self.rivals(key, failing, settle) if failing else {},
            winners=[] if desired else self.winners(schedext),
            settle=settle,
            up=len(up),
            settling=[wait for wait in waits if wait > 0],
            lacking=desired - current,
            steady=steady,
        )

    def rivals(self, key: Key, failing: list[Pod], settle: float) -> dict:
        """By node where a pod of ours fails: the SchedExt whose scheduler runs there."""
        now = monotonic()
        nodes = {pod.node for pod in failing}
        return {
            other.node: "/".join(other.key)
            for other in list(self.pods.values())
            if other.node in nodes and other.key != key
            if other.is_up and not other.fails(now, settle)
        }

    def winners(self, schedext: dict) -> list[str]:
        """The SchedExts that are more specific."""
        mine = selector_of(schedext)
        selectors = [selector for selector in list(self.schedexts.groups) if selector > mine]
        return sorted(
            "/".join(key_of(winner))
            for selector in selectors
            for winner in self.schedexts.select(selector)
        )

    def write_status(self, key: Key, schedext: dict, status: dict) -> None:
        patch = merge_patch(schedext, schedext | {"status": status})
        self.write("PATCH", path_to(SCHEDEXTS, *key, "status"), patch)
        self.histories[key].wrote()
        ready = condition(status, "Ready")
        reason, message = ready["reason"], ready["message"]
        if reason == condition(schedext["status"], "Ready").get("reason"):
            return
        if reason in ("NodesFailing", *STALLING):
            log.warning("%s/%s: %s: %s", *key, reason, message)
            self.send_event(schedext, reason, message)
        else:
            log.info("%s/%s: %s: %s", *key, reason, message)

    def send_event(self, schedext: dict, reason: str, message: str) -> None:
        """Send a Warning. A failure is ignored: the log and the status say much the same."""
        path = path_to(EVENTS, schedext["metadata"]["namespace"])
        event = build_event(schedext, reason, message, timestamp())
        with suppress(ApiError):
            self.write("POST", path, event, EVENT_SECONDS)

    def write(self, method: str, path: str, body: dict, timeout: float | None = None) -> dict:
        """The answer to a write. A leader that has lost its lease exits instead."""
        if self.elector:
            self.elector.exit_if_lost()
        # Skipping field validation spares the API server a second decoding.
        return self.api.request(method, path, body, timeout, fieldValidation="Ignore")


def build_event(schedext: dict, reason: str, message: str, now: str) -> dict:
    meta = schedext["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}."},
        "involvedObject": {
            "apiVersion": "sked.schedkit.io/v1",
            "kind": "SchedExt",
            **{field: meta[field] for field in ("namespace", "name", "uid")},
        },
        "type": "Warning",
        "reason": reason,
        "message": message[:1024],
        "source": {"component": "sked"},
        "firstTimestamp": now,
        "lastTimestamp": now,
    }


def drift_sentence(daemonset: dict, paths: Iterable[str]) -> str:
    """Who changed which fields, as the beginning of a sentence."""
    if not daemonset:
        return "an unknown client deleted the DaemonSet"
    return f"{daemonset['lastEditor'] or 'an unknown client'} changed {', '.join(paths)}"


def outside_spec(changes: dict) -> dict:
    """The changes of labels, annotations and owners, which have no generation to go by."""
    return {path: value for path, value in changes.items() if path.startswith("metadata.")}


def guard_for(changes: dict, is_drift: bool) -> str:
    """The field that guards a patch, see merge_patch.

    Parking, moving and adopting were decided on what we saw, so nothing may have changed since. The
    same goes for labels: they have no generation that would tell of an edit in between. The rest
    only must not hit another DaemonSet of the same name.
    """
    moves = not is_drift and not PLACEMENT.isdisjoint(changes)
    return "resourceVersion" if moves or outside_spec(changes) else "uid"


def check_control(schedext: dict, daemonset: dict) -> None:
    """Raise Blocked if the DaemonSet is being deleted, or another owner controls it.

    One that has our label and no owner is adopted.
    """
    namespace, name = key_of(schedext)
    meta = daemonset["metadata"]
    owner = controller_of(daemonset)
    is_leaving = "deletionTimestamp" in meta
    if owner.get("uid") == schedext["metadata"]["uid"] and not is_leaving:
        return
    if is_leaving or (owner.get("kind"), owner.get("name")) == ("SchedExt", name):
        raise Blocked("RollingOut", f"waiting for the old DaemonSet {name} to be deleted")
    is_orphan = not owner and OURS.items() <= meta.get("labels", {}).items()
    if not is_orphan or daemonset["spec"]["selector"] != {"matchLabels": {"name": name}}:
        raise Blocked(
            "NameTaken",
            f"a DaemonSet {name} exists that is not sked's: give this SchedExt another name, or "
            f"delete that DaemonSet with 'kubectl delete daemonset -n {namespace} {name}'",
        )


# ---------------------------------------------------------------- what sked remembers

QUICK_REPAIRS = 6  # made at once; after that it is a fight, and sked pauses between repairs
QUIET_SECONDS = 60.0  # after this long without a repair, a fight is over


class History:
    """What sked did and saw for one SchedExt. A restart loses it, which costs at most one patch."""

    def __init__(self) -> None:
        # What we wanted when we last wrote the DaemonSet or found it as wanted. JSON takes a third
        # of a dict's memory.
        self.wanted = ""
        self.uid = ""  # of the DaemonSet at that moment
        self.generation = 0  # likewise
        self.is_ours_alone = True  # False if an edit came between our look and our write
        self.repairs = 0  # in a row
        self.next_repair = -inf  # the earliest time for another one
        self.wrote_at = -inf  # when we last wrote the DaemonSet or the status
        self.counts = ()  # of the DaemonSet's pods, as last seen
        self.counts_since = -inf

    def wrote_daemonset(self, want: dict, have: dict, answer: dict) -> None:
        self.remember(want, answer)
        self.wrote()
        # A write adds one to the generation. If it is higher, an edit came in between.
        self.is_ours_alone = self.generation <= generation_of(have) + 1

    def remember(self, want: dict, daemonset: dict) -> None:
        if not self.wanted_before(want):
            self.wanted = json.dumps(want)
            self.repairs = 0  # what follows is no longer the same fight
            self.next_repair = -inf
        self.uid = daemonset["metadata"]["uid"]
        self.generation = generation_of(daemonset)
        self.is_ours_alone = True

    def had_daemonset(self) -> bool:
        """Whether there has been a DaemonSet as wanted."""
        return bool(self.wanted)

    def wanted_before(self, want: dict) -> bool:
        return self.wanted == json.dumps(want)

    def last_wanted(self) -> dict:
        """What we wanted, or {} right after a restart of sked."""
        return json.loads(self.wanted or "{}")

    def parked_as(self) -> str | None:
        """The fingerprint with which we wanted the DaemonSet parked, if we did."""
        last = self.last_wanted()
        return annotation(last, PARKED) if last else None

    def is_drift(self, want: dict, have: dict) -> bool:
        """Whether a difference between the two is someone else's doing.

        It is if we wanted the same before, or if the DaemonSet that we made for this SchedExt
        is gone.
        """
        if have:
            return self.wanted_before(want)
        last = self.last_wanted()
        owners = last["metadata"]["ownerReferences"] if last else None
        return owners == want["metadata"]["ownerReferences"]

    def is_ahead_of(self, daemonset: dict) -> bool:
        """Whether this copy of the DaemonSet is older than our last write."""
        is_same = self.uid == daemonset["metadata"]["uid"]
        return is_same and self.generation > generation_of(daemonset)

    def is_untouched(self, daemonset: dict) -> bool:
        """Whether the DaemonSet's spec is still as we last wrote or found it."""
        is_same = bool(daemonset) and self.uid == daemonset["metadata"]["uid"]
        return is_same and self.is_ours_alone and self.generation == generation_of(daemonset)

    def repaired(self) -> int:
        """Note that our last write was a repair. Returns how many there were in a row."""
        if self.wrote_at > self.next_repair + QUIET_SECONDS:
            self.repairs = 0
        self.repairs += 1
        self.next_repair = self.wrote_at
        if self.repairs > QUICK_REPAIRS:
            self.next_repair += backoff(self.repairs - QUICK_REPAIRS, RETRY_SECONDS)
        return self.repairs

    def check_pace(self, drift: str) -> None:
        """Raise Blocked if it is too soon for another repair.

        Another controller or a script may keep setting another value. sked never gives up, but it
        waits longer each time, until no repair has been needed for a minute.
        """
        wait = self.next_repair - monotonic()
        if wait > 0:
            message = f"{drift} again; sked has reverted it {self.repairs} times and is backing off"
            raise Blocked("RollingOut", message, wait)

    def wrote(self) -> None:
        """Note a write, of the DaemonSet or of the status."""
        self.wrote_at = monotonic()

    def status_due_in(self) -> float:
        """Seconds until the status may be written: not within a second of the last write."""
        return self.wrote_at + GATHER_SECONDS - monotonic()

    def note_counts(self, counts: tuple, was_failing: bool) -> float:
        """Note the counts. Returns for how many seconds they have been the same.

        Infinite at the first look if the status says NodesFailing already: a restart of sked does
        not hide a failure for 10 s.
        """
        now = monotonic()
        if counts != self.counts:
            is_first_look = not self.counts
            if not (is_first_look and was_failing):
                self.counts_since = now
            self.counts = counts
        return now - self.counts_since


# ---------------------------------------------------------------- the DaemonSet

SUSPENDED = "sked.schedkit.io/suspended"  # a label that no node has
PARKED = "sked.schedkit.io/parked"  # an annotation: the fingerprint of what the pods run
POD_FIELDS = ("tolerations", "priorityClassName", "imagePullSecrets", "hostPID")
CONTAINER_FIELDS = ("args", "env", "resources", "imagePullPolicy", "terminationMessagePolicy")
SHAPES = {
    "sched": (str, "the image of a scheduler"),
    "probeImage": (str, "an image with sh and grep"),
    "nodeSelector": (dict, "a map of labels"),
    "hostPaths": (list, "a list of paths"),
}
# The probe asks the kernel whether a scheduler is attached. It is ready once one is, and ends when
# none has been for 8 s (some re-attach on CPU hotplug). If none attaches within 30 s, the kubelet
# ends it by SIGTERM, which PID 1 would ignore without a trap. null: sked keeps the field unset.
PROBE_CONTAINER = yaml.safe_load("""
name: probe
command:
- sh
- -c
- |
  attached() {
    state=
    read -r state 2>/dev/null </sys/kernel/sched_ext/state
    [ "$state" = enabled ]
  }
  leave() {
    attached && exit 0
    words="no scheduler is attached: /sys/kernel/sched_ext/state is"
    echo "$words '${state:-not there}'" >/dev/termination-log
    exit 1
  }
  trap leave TERM
  until attached; do sleep 1 & wait $!; done
  misses=0
  while [ $misses -lt 4 ]; do
    sleep 2 & wait $!
    if attached; then misses=0; else misses=$((misses + 1)); fi
  done
  leave
startupProbe:
  exec: {command: [grep, -qx, enabled, /sys/kernel/sched_ext/state]}
  periodSeconds: 2
  timeoutSeconds: 5
  successThreshold: 1
  failureThreshold: 15
securityContext:
  runAsNonRoot: true
  runAsUser: 65534
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
args: null
env: null
resources: null
imagePullPolicy: null
terminationMessagePolicy: File
volumeMounts: null
""")


class InvalidSpec(ValueError):
    """A SchedExt that cannot become a DaemonSet, and why."""


def build_daemonset(schedext: dict, yields_to: Iterable[dict] = ()) -> dict:
    """The DaemonSet of a SchedExt, kept off the nodes of the more specific ones in yields_to.

    Raises InvalidSpec, a ValueError, if there can be none.
    """
    want = owned_fields(schedext, map(selector_of, yields_to))
    target, _ = as_wanted({}, want)
    daemonset = {"apiVersion": "apps/v1", "kind": "DaemonSet", **target}
    # A copy, which shares nothing with us or the SchedExt. YAML may have parsed an unquoted string
    # as a date.
    return json.loads(json.dumps(daemonset, default=str))


def owned_fields(schedext: dict, selectors: Iterable[Selector]) -> dict:
    """Every field of the DaemonSet that sked owns; None for what should not be set."""
    check_spec(schedext)
    meta, spec = schedext["metadata"], schedext["spec"]
    name = meta["name"]
    volumes = {f"host-{n}": path for n, path in enumerate(spec.get("hostPaths") or ())}
    suspended = {SUSPENDED: "true"} if spec.get("suspend") else {}
    scx = {
        "name": SCX,
        "image": spec.get("sched"),
        "command": None,  # the image's own; any other is undone
        **{field: spec.get(field) for field in CONTAINER_FIELDS},
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": n, "mountPath": path} for n, path in volumes.items()],
    }
    probe = PROBE_CONTAINER | {"image": spec.get("probeImage")}
    owner = {
        "apiVersion": "sked.schedkit.io/v1",
        "kind": "SchedExt",
        "name": name,
        "uid": meta.get("uid"),  # a manifest that was never applied has none
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "metadata": {
            "name": name,
            "namespace": meta.get("namespace"),
            "labels": OURS,
            "annotations": {PARKED: None},
            "ownerReferences": [owner] if meta.get("uid") else [],
        },
        "spec": {
            "selector": {"matchLabels": {"name": name}},
            "updateStrategy": spec.get("updateStrategy"),
            "minReadySeconds": spec.get("minReadySeconds"),
            "template": {
                "metadata": {"labels": {"name": name, **OURS}},
                "spec": {
                    "containers": [scx, probe] if spec.get("probeImage") else [scx],
                    "nodeSelector": (spec.get("nodeSelector") or {}) | suspended,
                    "affinity": node_affinity(selector_of(schedext), selectors),
                    **{field: spec.get(field) for field in POD_FIELDS},
                    "volumes": [
                        {"name": n, "hostPath": {"path": path}} for n, path in volumes.items()
                    ],
                },
            },
        },
    }


def check_spec(schedext: dict) -> None:
    meta, spec = schedext.get("metadata"), schedext.get("spec")
    if not isinstance(meta, dict) or not meta.get("name"):
        raise InvalidSpec("metadata.name is missing")
    if not isinstance(meta["name"], str):
        raise InvalidSpec(f"metadata.name must be text: write it in quotes, '{meta['name']}'")
    if not isinstance(spec, dict) or not spec.get("sched"):
        raise InvalidSpec("spec.sched is missing: it names the image of a scheduler")
    for field, (shape, words) in SHAPES.items():
        if not isinstance(spec.get(field), (shape, type(None))):
            raise InvalidSpec(f"spec.{field} must be {words}")


DESIRED = "desiredNumberScheduled"  # counts in a status: nodes that should have a pod,
CURRENT = "currentNumberScheduled"  # those of them that have one,
UPDATED = "updatedNumberScheduled"  # and those that have one of the current template
NO_DAEMONSET = {  # never observed, so the status says RollingOut
    "metadata": {"uid": None, "generation": 1},
    "spec": {},
    "status": {},
}


def number(daemonset: dict, which: str) -> int:
    """One of the counts in its status."""
    return daemonset["status"].get(which, 0)


def generation_of(daemonset: dict) -> int:
    """How often its spec has changed, its creation included; 0 if there is none."""
    return daemonset["metadata"]["generation"] if daemonset else 0


def is_observed(daemonset: dict) -> bool:
    """Whether its status describes its current spec."""
    return daemonset["status"].get("observedGeneration") == generation_of(daemonset)


def annotation(obj: dict, name: str) -> str | None:
    return obj["metadata"].get("annotations", {}).get(name)


# ---------------------------------------------------------------- what differs

# Maps in which others may set fields, too. Containers are compared as a map, by their names.
SHARED = ("metadata", "labels", "annotations", "spec", "template", SCX, PROBE)
CONTAINERS = "spec.template.spec.containers"
BLANK = (None, "", [], {})
DEFAULTS = {  # what the API server fills in, besides blanks
    "spec.minReadySeconds": 0,
    "spec.updateStrategy.type": "RollingUpdate",
    "spec.updateStrategy.rollingUpdate.maxUnavailable": 1,
    "spec.updateStrategy.rollingUpdate.maxSurge": 0,
    "spec.template.spec.hostPID": False,
    "spec.template.spec.containers.scx.terminationMessagePolicy": "File",
    "spec.template.spec.containers.scx.env.valueFrom.fieldRef.apiVersion": "v1",
    "spec.template.spec.containers.scx.env.valueFrom.resourceFieldRef.divisor": 0,
}
AMOUNTS = (
    "spec.template.spec.containers.scx.resources.",
    "spec.template.spec.containers.scx.env.valueFrom.resourceFieldRef.divisor",
)
LATEST = re.compile(r"(.*/)?[^/:@]+(:latest(@.*)?)?")  # an image whose tag is latest


def as_wanted(have: dict, want: dict, path: str = "") -> tuple[dict, dict]:
    """What is there, with the fields that sked owns as wanted, and what that changes.

    All other fields stay, and so does a value that means the same. The changes are the wanted
    values by path, as plain() spells them.
    """
    target = dict(have)
    changes = {}
    for name, mine in want.items():
        here = path + name
        theirs = have.get(name)
        if name in SHARED and mine:
            merged, inner = as_wanted(theirs or {}, mine, f"{here}.")
            target[name] = merged or None
            changes |= inner
        elif here == CONTAINERS:
            there = by_name(theirs)
            removed = {container: None for container in there}
            merged, inner = as_wanted(there, removed | by_name(mine), f"{here}.")
            target[name] = list(merged.values())
            changes |= inner
        else:
            if name == "ownerReferences":
                mine = with_other_owners(mine, theirs)
            elif name == "imagePullPolicy":  # the API server picks one by the image's tag
                default = "Always" if LATEST.fullmatch(want["image"]) else "IfNotPresent"
                mine = mine or default
                theirs = theirs or default
            if mine != theirs and plain(here, mine) != plain(here, theirs):
                target[name] = mine
                changes[here] = plain(here, mine)
    return {name: value for name, value in target.items() if value is not None}, changes


def with_other_owners(mine: list, theirs: list | None) -> list:
    """Owner references, with those of others."""
    owners = {owner["uid"]: owner for owner in [*(theirs or ()), *mine]}
    return list(owners.values())


def by_name(containers: list | None) -> dict:
    return {container["name"]: container for container in containers or ()}


def plain(path: str, value: Any) -> Any:
    """A field in one spelling. None if it is blank or the API server's default."""
    if isinstance(value, list):
        value = [plain(path, item) for item in value]
    elif isinstance(value, dict) and not path.endswith("nodeSelector"):  # its values may be blank
        fields = {name: plain(f"{path}.{name}", field) for name, field in value.items()}
        value = {name: field for name, field in fields.items() if field is not None}
    elif path.startswith(AMOUNTS):
        with suppress(ValueError, ArithmeticError):  # if it is nonsense, the API server says so
            value = ceil(1000 * parse_quantity(str(value)))  # 0.5 and 500m are the same
    return None if value in BLANK or value == DEFAULTS.get(path) else value


def merge_patch(have: dict, target: dict, guard: str = "resourceVersion") -> dict:
    """The JSON merge patch that turns have into target: null removes a field.

    It carries one field that has not changed, the guard, and the API server refuses the patch if
    that is no longer so. The resourceVersion guards against any change since we looked, also of
    the status, which changes often. The uid guards against another object of the same name.
    """
    patch = {}
    for name in have | target:
        theirs, mine = have.get(name), target.get(name)
        if isinstance(theirs, dict) and isinstance(mine, dict):
            inner = merge_patch(theirs, mine, guard)
            if inner:
                patch[name] = inner
        elif mine != theirs or name == guard:
            patch[name] = mine
    return patch


# ---------------------------------------------------------------- placement

MAX_TERMS = 100  # of a node affinity
PLACEMENT = {"spec.template.spec.nodeSelector", "spec.template.spec.affinity"}


def selector_of(schedext: dict) -> Selector:
    """Empty if nodeSelector is not a map, which a lax CRD may allow."""
    with suppress(KeyError, TypeError, AttributeError):
        pairs = schedext["spec"]["nodeSelector"].items()
        return frozenset((str(key), str(value)) for key, value in pairs)
    return frozenset()


def node_affinity(mine: Selector, others: Iterable[Selector]) -> dict | None:
    """What keeps a SchedExt off the nodes of the more specific ones.

    A node is not a winner's if it lacks one of the winner's extra pairs. So there is a term (terms
    are ORed) for each way to pick one extra pair of every winner. A suspended winner counts, too.
    """
    winners = {other for other in others if other > mine}
    if not winners:
        return None
    terms = {frozenset()}
    # the shortest first, so that there are few terms on the way
    for winner in sorted(winners, key=lambda pairs: (len(pairs), sorted(pairs))):
        terms = {term | {pair} for term in terms for pair in winner - mine}
        # a term that contains another one adds nothing
        terms = {term for term in terms if not any(wider < term for wider in terms)}
        if len(terms) > MAX_TERMS:
            raise InvalidSpec(
                "too many node pools: yielding to the SchedExts with a more specific nodeSelector "
                f"takes more than {MAX_TERMS} affinity terms, so the DaemonSet is not written; "
                "use one label with a different value for each pool"
            )
    rules = {"nodeSelectorTerms": [not_in(term) for term in sorted(terms, key=sorted)]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": rules}}


def not_in(pairs: Selector) -> dict:
    """The affinity term for nodes that have none of the pairs."""
    values = defaultdict(list)
    for key, value in sorted(pairs):
        values[key].append(value)
    return {
        "matchExpressions": [
            {"key": key, "operator": "NotIn", "values": values[key]} for key in values
        ]
    }


def only_placement_is_new(want: dict, have: dict, changes: dict, history: History) -> bool:
    """Whether we want another placement than before, and nothing else of the template is new.

    An edit of the placement by another client is drift. Right after a restart of sked we cannot
    tell the two apart, so what is there counts as what we wanted before.
    """
    if PLACEMENT.isdisjoint(changes):
        return False
    last = history.last_wanted()
    if last and placement_of(want) == placement_of(last):
        return False
    if history.is_untouched(have):
        # Any other difference is admission's. So we compare our wish with our last one, not with
        # what is there.
        return fingerprint(want, have) == fingerprint(last, have)
    template_changes = {path for path in changes if path.startswith("spec.template.")}
    return template_changes <= PLACEMENT


def placement_of(want: dict) -> list:
    pod = want["spec"]["template"]["spec"]
    return [pod["nodeSelector"], pod["affinity"]]


def is_rolled_out(daemonset: dict, pods: list[Pod]) -> bool:
    """Whether all pods are of the current template.

    The counts of the status tell, unless there are pods on lost or tainted nodes: the counts leave
    those out, and they may lag. Then all pods must be of one revision, and the counts or one of the
    pods must show that it is the current one.
    """
    current, updated = number(daemonset, CURRENT), number(daemonset, UPDATED)
    misscheduled = number(daemonset, "numberMisscheduled")
    if not pods and not current and not misscheduled:
        return True  # the first pods may be on their way, and they are of this template
    all_updated = current > 0 and updated == current
    if all_updated and not misscheduled:
        return True
    is_one_revision = len({pod.revision for pod in pods}) == 1
    generation = annotation(daemonset, "deprecated.daemonset.template.generation")
    is_one_current = any(pod.template_generation == generation for pod in pods)
    return is_one_revision and (all_updated or is_one_current)


def fingerprint(want: dict, have: dict) -> str:
    """Changes exactly when the pods have to restart, wherever they run.

    It is a hash of the wanted template without its placement, in one spelling: all that differs
    from an empty DaemonSet.
    """
    _, everything = as_wanted({}, want)
    runs = {
        path: value
        for path, value in everything.items()
        if path.startswith("spec.template.") and path not in PLACEMENT
    }
    runs["restart"] = annotation(have["spec"]["template"], "kubectl.kubernetes.io/restartedAt")
    return hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()[:16]


def parked_if_possible(
    want: dict, have: dict, changes: dict, pods: list[Pod], history: History
) -> dict:
    """What we want, in parked form if no pod has to restart on the nodes that it keeps.

    A change of the placement only says who gets which node, so running pods need not follow it:
    the DaemonSet controller removes and adds them whatever the strategy. A parked DaemonSet
    therefore has the strategy OnDelete, and in an annotation the fingerprint of what all its pods
    run. Raises Blocked until the controller has observed the last change.
    """
    parked_as = {annotation(have, PARKED), history.parked_as()} - {None}
    if parked_as:
        # It stays parked as long as its pods run what is wanted, whatever the nodes are doing and
        # also if only the annotation was removed. Otherwise the wanted strategy comes back, and
        # all pods follow.
        return parked_form(want, have) if fingerprint(want, have) in parked_as else want
    if not only_placement_is_new(want, have, changes, history):
        return want  # the pods have to restart, or it is drift: a plain patch
    if not is_observed(have):
        # The counts and pods are those of an earlier template.
        raise Blocked("RollingOut", "waiting for the DaemonSet controller", GATHER_SECONDS)
    # In the middle of a rollout, parking would leave the old pods as they are.
    return parked_form(want, have) if is_rolled_out(have, pods) else want


def parked_form(want: dict, have: dict) -> dict:
    return want | {
        "metadata": want["metadata"] | {"annotations": {PARKED: fingerprint(want, have)}},
        "spec": want["spec"] | {"updateStrategy": {"type": "OnDelete"}},
    }


# ---------------------------------------------------------------- status

MAX_FAILURES = 10  # listed in a status
STALLING = ("NameTaken", "Rejected")  # reasons that waiting does not fix


class View(NamedTuple):
    """One SchedExt with its DaemonSet and pods, at one moment."""

    schedext: dict
    daemonset: dict
    pods: list[Pod]
    failing: list[Pod]
    rivals: dict  # by node where one fails: the SchedExt whose scheduler runs there
    winners: list[str]  # the more specific SchedExts, if no node is left
    settle: float  # seconds that a pod must stay up before it counts as ready
    up: int  # how many pods are up
    settling: list[float]  # seconds left for each pod that is up and has not settled
    lacking: int  # nodes that want a pod and have none
    steady: float  # seconds for which the counts of the DaemonSet have been the same

    def is_parked(self) -> bool:
        return bool(annotation(self.daemonset, PARKED))

    def is_current(self) -> bool:
        """Whether all pods run what is wanted: parked, or updated by the counts and by the pods."""
        if self.is_parked():
            return True
        all_updated = number(self.daemonset, UPDATED) >= number(self.daemonset, DESIRED)
        return all_updated and len({pod.revision for pod in self.pods}) == 1


def build_status(view: View, blocked: Blocked | None, now: str) -> dict:
    """The status of a SchedExt."""
    old = view.schedext["status"]
    generation = view.schedext["metadata"]["generation"]
    failures = build_failures(view)
    nodes = count_nodes(view, len(failures))
    if blocked:
        reason, message = blocked.reason, str(blocked)
    else:
        reason, message = ready_reason(view, nodes, failures)
    is_ready = reason in ("AllReady", "Suspended")
    states = {"Ready": "True" if is_ready else "False"}
    if reason in STALLING:
        states["Stalled"] = "True"  # else GitOps tools would wait forever
    conditions = [c for c in old.get("conditions", ()) if c["type"] not in ("Ready", "Stalled")]
    for kind, state in states.items():
        before = condition(old, kind)
        stays = before.get("status") == state
        conditions.append(
            {
                "type": kind,
                "status": state,
                "reason": reason,
                "message": message,
                "observedGeneration": generation,
                "lastTransitionTime": before.get("lastTransitionTime", now) if stays else now,
            }
        )
    return {
        "observedGeneration": generation,
        "nodes": nodes,
        "failures": failures[:MAX_FAILURES],
        "conditions": conditions,
    }


def condition(status: dict, kind: str) -> dict:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def build_failures(view: View) -> list:
    """One for each failing pod, sorted by node."""
    failures = []
    for pod in sorted(view.failing, key=lambda pod: pod.node):
        reason, message = pod.reason, pod.message
        if reason == CRASHED and pod.node in view.rivals:
            reason = "AlreadyAttached"
            message = (
                f"the scheduler of SchedExt {view.rivals[pod.node]} runs on this node, "
                f"and a kernel attaches one at a time; {message}"
            )
        failures.append(
            {"node": pod.node, "pod": pod.name, "reason": reason, "message": message[:1000]}
        )
    return failures


def count_nodes(view: View, failing: int) -> dict:
    """The DaemonSet's status counts the nodes; the pods show which have settled and which fail."""
    up = min(view.up, number(view.daemonset, "numberReady"))
    if view.steady >= SETTLE_SECONDS:
        failing += view.lacking
    return {
        "desired": number(view.daemonset, DESIRED),
        "ready": max(0, up - len(view.settling)),
        "updated": number(view.daemonset, CURRENT if view.is_parked() else UPDATED),
        "failing": failing,
    }


def ready_reason(view: View, nodes: dict, failures: list) -> Problem:
    """Reason and message of the Ready condition if the DaemonSet is as it should be."""
    desired = nodes["desired"]
    if not is_observed(view.daemonset):
        return "RollingOut", "waiting for the DaemonSet controller"
    if view.schedext["spec"].get("suspend"):
        left = number(view.daemonset, "numberMisscheduled")
        if left:
            return "RollingOut", f"suspended; waiting for pods to end: {left}"
        return "Suspended", "runs on no node; set spec.suspend to false to resume"
    if not desired:
        return "NoNodes", no_nodes_message(view)
    if nodes["failing"]:
        return "NodesFailing", failing_message(view, nodes, failures)
    if nodes["ready"] >= desired and view.is_current():
        return "AllReady", f"running on {desired} of {desired} nodes"
    return "RollingOut", rolling_message(view, nodes)


def no_nodes_message(view: View) -> str:
    pairs = ",".join("=".join(pair) for pair in sorted(selector_of(view.schedext)))
    command = f"kubectl get nodes --selector={pairs}" if pairs else "kubectl get nodes"
    message = f"no node to run on: check that '{command}' lists nodes, and their taints"
    if view.winners:
        names = ", ".join(view.winners[:5])
        if len(view.winners) > 5:
            names += f" and {len(view.winners) - 5} more"
        message += f"; these more specific SchedExts may claim them all: {names}"
    return message


def failing_message(view: View, nodes: dict, failures: list) -> str:
    message = f"failing on {nodes['failing']} of {nodes['desired']} nodes; "
    namespace, name = key_of(view.schedext)
    if failures:
        return message + "{node}: {reason}: {message}".format(**failures[0])
    message += f"{view.lacking} without a pod: see "
    message += f"'kubectl describe daemonset -n {namespace} {name}'"
    if not view.pods:
        message += (
            "; if the namespace forbids privileged pods, run 'kubectl label --overwrite namespace "
            f"{namespace} pod-security.kubernetes.io/enforce=privileged'"
        )
    return message


def rolling_message(view: View, nodes: dict) -> str:
    namespace, name = key_of(view.schedext)
    message = "ready on {ready} of {desired} nodes, updated on {updated}".format(**nodes)
    strategy = view.daemonset["spec"].get("updateStrategy", {})
    has_old_pods = len({pod.revision for pod in view.pods}) > 1 and not view.is_parked()
    if has_old_pods and nodes["updated"] >= nodes["desired"]:
        message += "; waiting for the last old pods to go"
    elif view.settling:
        message += f"; waiting for the pods to stay up for {view.settle:.0f} s"
    elif strategy.get("type") == "OnDelete" and nodes["updated"] < number(view.daemonset, CURRENT):
        message += "; updateStrategy is OnDelete: to replace the pods, run 'kubectl delete pod "
        message += f"-n {namespace} -l name={name},managed-by=sked-controller'"
    return message


def next_change_in(view: View, blocked: Blocked | None) -> float:
    """Seconds until time alone may change the status."""
    waits = list(view.settling)
    if blocked:
        waits.append(blocked.look_again)
    if view.lacking and view.steady < SETTLE_SECONDS:
        waits.append(SETTLE_SECONDS - view.steady)
    if view.failing:
        waits.append(BLOCKED_SECONDS)  # another scheduler may have left the node
    return min(waits, default=inf)


# ---------------------------------------------------------------- the lease

LEASE_NAME = "b4c95cb3.schedkit.io"  # the Go operator's, so that the two never act at once
LEASE_SECONDS = 15
RENEW_SECONDS = 2.0
RENEW_REQUEST_SECONDS = 4.0
RENEW_DEADLINE_SECONDS = 10.0  # a leader that has not renewed for this long exits


class Elector:
    """Holds the Lease. Another replica's has expired once it has not changed for its duration."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.path = path_to(LEASES, namespace, LEASE_NAME)
        self.identity = f"{socket.gethostname()}_{uuid.uuid4()}"
        self.lease = self.new_lease = {"metadata": {"name": LEASE_NAME, "namespace": namespace}}
        self.is_fresh = False  # True after our own PUT: then the next renewal needs no GET
        self.seen = -inf  # when the lease was seen to change
        self.renewed = -inf  # when we sent the last PUT that succeeded
        self.has_led = False

    def leads(self) -> bool:
        return monotonic() < self.renewed + RENEW_DEADLINE_SECONDS

    def exit_if_lost(self) -> None:
        """Exit if we led and may have lost the lease: we may have been held up."""
        if self.has_led and not self.leads():
            log.critical("the lease is lost: another replica may lead now")
            os._exit(1)

    def run(self, operator: Operator) -> None:
        """Take the lease when it is free, start the operator, renew, and hand over at the end."""
        log.info("waiting for the lease as %s", self.identity)
        while not operator.stop.is_set():
            operator.beat()
            try:
                self.take()
                operator.recovered("lease")
            except ApiError as error:
                self.is_fresh = False
                if error.status != 409:  # which means that another replica was faster
                    operator.fault("lease", str(error))
            self.exit_if_lost()
            if self.leads() and not self.has_led:
                self.has_led = True
                log.info("leading")
                operator.start()
            operator.stop.wait(RENEW_SECONDS)
        if operator.queue.close(FINISH_SECONDS) and self.leads():
            spec = self.lease["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1}
            with suppress(ApiError):
                self.put(spec, timeout=0.6)

    def take(self) -> None:
        """Take or renew the lease if it is free or ours."""
        if not self.is_fresh or not self.leads():
            lease = self.api.get(self.path, timeout=RENEW_REQUEST_SECONDS) or self.new_lease
            if lease != self.lease:
                self.lease = lease
                self.seen = monotonic()
        asked = monotonic()
        now = timestamp("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = self.lease.get("spec") or {}
        holder = spec.get("holderIdentity")
        if holder != self.identity:
            self.renewed = -inf
            if holder and asked < self.seen + spec.get("leaseDurationSeconds", LEASE_SECONDS):
                return
            changes_of_hands = spec["leaseTransitions"] + 1 if "leaseTransitions" in spec else 0
            spec = spec | {"acquireTime": now, "leaseTransitions": changes_of_hands}
        ours = {"holderIdentity": self.identity, "leaseDurationSeconds": LEASE_SECONDS}
        self.put(spec | ours | {"renewTime": now}, RENEW_REQUEST_SECONDS)
        self.is_fresh = True
        self.renewed = asked

    def put(self, spec: dict, timeout: float) -> None:
        """PUT also creates the Lease. If there is one, its resourceVersion makes the PUT fail when
        another replica was faster."""
        self.lease = self.api.request("PUT", self.path, self.lease | {"spec": spec}, timeout)


# ---------------------------------------------------------------- health and metrics

METRICS_HELP = """\
controller_runtime_reconcile_total counter Passes over a SchedExt, by result.
controller_runtime_reconcile_time_seconds histogram Duration of such a pass.
rest_client_requests_total counter Requests to the API server, by HTTP status (0: no full answer).
workqueue_depth gauge SchedExts that wait for a worker.
leader_election_master_status gauge 1 if this replica leads, 0 if it stands by.
sked_schedext_nodes gauge Nodes of each SchedExt that is not suspended, by state.
sked_schedext_status gauge 1 for the reason of each SchedExt's Ready condition.
sked_build_info gauge The version of sked.
"""
BUCKETS = (0.01, 0.1, 1.0, 10.0, "+Inf")  # seconds
MAX_CONNECTIONS = 64  # to each of our own HTTP servers

Page = tuple[int, str]  # HTTP status and text


class Metrics(Counter):
    """Samples, by name and labels as Prometheus writes them. No label needs escaping."""

    lock = threading.Lock()

    def requested(self, method: str, status: int) -> None:
        with self.lock:
            self[f'rest_client_requests_total{{code="{status}",method="{method}"}}'] += 1

    def reconciled(self, result: str, seconds: float) -> None:
        """Count a pass; its duration is in each bucket that is large enough."""
        name = "controller_runtime_reconcile"
        label = 'controller="schedext"'
        with self.lock:
            self[f'{name}_total{{{label},result="{result}"}}'] += 1
            self[f"{name}_time_seconds_sum{{{label}}}"] += seconds
            self[f"{name}_time_seconds_count{{{label}}}"] += 1
            for bound in BUCKETS:
                bucket = f'{name}_time_seconds_bucket{{{label},le="{bound}"}}'
                self[bucket] += seconds <= float(bound)

    def text(self, gauges: dict) -> str:
        """All of it, as Prometheus reads it."""
        with self.lock:
            samples = {**self, **gauges}
        lines = []
        for line in METRICS_HELP.splitlines():
            name, kind, meaning = line.split(" ", 2)
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
            lines += [f"{s} {float(samples[s])}" for s in samples if s.startswith(name)]
        return "\n".join(lines)


METRICS = Metrics()


@functools.lru_cache(100)
def review(api: Api, authorization: str, minute: int) -> int:
    """200 if the API server lets the caller get /metrics, else the HTTP status of the refusal.

    Answers are cached; the minute makes sure that they expire.
    """
    token = authorization.partition(" ")[2]
    if not token:
        return 401
    path = "/apis/authentication.k8s.io/v1/tokenreviews"
    answer = api.request("POST", path, {"spec": {"token": token}}, timeout=5)["status"]
    if not answer.get("authenticated"):
        return 401
    spec = answer["user"]  # a SubjectAccessReview takes the same, but says user for username
    spec["user"] = spec.pop("username")
    spec["nonResourceAttributes"] = {"path": "/metrics", "verb": "get"}
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    answer = api.request("POST", path, {"spec": spec}, timeout=5)["status"]
    return 200 if answer.get("allowed") else 403


def healthz(operator: Operator) -> Page:
    silent = ", ".join(operator.silent_threads())
    return (503, f"no sign of life from {silent}") if silent else (200, "ok")


def readyz(operator: Operator) -> Page:
    if not operator.leads():
        return 200, "standing by"
    return (200, "ok") if operator.is_ready() else (503, "the caches are not filled yet")


def metrics(operator: Operator) -> Page:
    """What was counted so far, and what is measured now."""
    gauges = {
        'workqueue_depth{name="schedext"}': operator.queue.depth(),
        f'leader_election_master_status{{name="{LEASE_NAME}"}}': operator.leads(),
        f'sked_build_info{{version="{__version__}"}}': 1,
    }
    for schedext in list(operator.schedexts.values()):
        namespace, name = key_of(schedext)
        labels = f'namespace="{namespace}",name="{name}"'
        if reason := condition(schedext["status"], "Ready").get("reason"):
            gauges[f'sked_schedext_status{{{labels},reason="{reason}"}}'] = 1
        if not schedext["spec"].get("suspend"):  # else an alert would fire because it runs nowhere
            for state, nodes in schedext["status"].get("nodes", {}).items():
                gauges[f'sked_schedext_nodes{{{labels},state="{state}"}}'] = nodes
    return 200, METRICS.text(gauges)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET for the server's pages; if it is an HTTPS server, only to authorized callers."""

    timeout = 5

    def do_GET(self) -> None:
        status, text = self.answer()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.end_headers()
        self.wfile.write(f"{text}\n".encode())

    def answer(self) -> Page:
        server = self.server
        page = server.pages.get(self.path.partition("?")[0])
        if not page:
            return 404, "not found"
        if server.certificate:
            try:
                status = review(
                    server.operator.api,
                    self.headers.get("Authorization", ""),
                    int(monotonic() // 60),
                )
            except ApiError as error:
                return 503, str(error)
            if status != 200:
                return status, "not authorized to get /metrics"
        return page(server.operator)

    def log_message(self, *_: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """Serves pages at an address in Go's form (':8081', '127.0.0.1:8081', '[::1]:8081')."""

    request_queue_size = 128

    def __init__(
        self, address: str, operator: Operator, pages: dict, certificate: str = ""
    ) -> None:
        host, _, port = address.rpartition(":")
        if socket.has_dualstack_ipv6() and (not host or ":" in host):
            self.address_family = socket.AF_INET6
        self.operator = operator
        self.pages = pages
        self.certificate = certificate  # the directory of tls.crt and tls.key, if it is HTTPS
        self.held = []  # the connections, the oldest first
        super().__init__((host.strip("[]"), int(port)), Handler)
        spawn(self.serve_forever, address)

    def get_request(self) -> tuple:
        connection, address = super().get_request()
        if self.certificate:  # loaded again: it may have been renewed
            tls = server_tls(self.certificate)
            connection = tls.wrap_socket(connection, True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: socket.socket, client_address: Any) -> None:
        """Answer in a new thread. If there are too many connections, drop the oldest."""
        if len(self.held) >= MAX_CONNECTIONS:
            with suppress(OSError):
                self.held.pop(0).shutdown(socket.SHUT_RDWR)
        self.held.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        with suppress(ValueError):  # it was dropped
            self.held.remove(request)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        log.debug("a connection failed", exc_info=True)


def server_tls(directory: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(f"{directory}/tls.crt", f"{directory}/tls.key")
    except OSError as error:
        raise OSError(f"cannot load tls.crt and tls.key from {directory}: {error}") from None
    return context


def self_signed() -> str:
    """A new directory with a certificate of our own."""
    directory = tempfile.mkdtemp(prefix="sked-")
    atexit.register(shutil.rmtree, directory)
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 "
        f"-subj /CN=sked -keyout {directory}/tls.key -out {directory}/tls.crt"
    )
    try:
        subprocess.run(command.split(), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"cannot make a certificate: give one with --metrics-cert-dir ({error})"
        ) from None
    return directory


# ---------------------------------------------------------------- the command line

STOP_SECONDS = 1.8  # from SIGTERM to exit, whatever is under way


def load_configuration(path: str | None, context: str | None) -> Configuration:
    """The flag, else $KUBECONFIG, else the pod's own (unless --context), else ~/.kube/config."""
    configuration = Configuration()
    variable = os.environ.get("KUBECONFIG")
    if not (path or variable or context) and "KUBERNETES_SERVICE_HOST" in os.environ:
        kubeconfig.load_incluster_config(configuration)
        return configuration
    if path:
        hint = "check --kubeconfig"
    elif variable:
        hint = "check $KUBECONFIG"
    else:
        hint = "name one with --kubeconfig or $KUBECONFIG"
    path = path or variable or "~/.kube/config"
    files = [f for f in map(os.path.expanduser, path.split(os.pathsep)) if os.path.exists(f)]
    if not files:
        raise ValueError(f"no kubeconfig at {path}: {hint}")
    context, contexts = read_contexts(files, context, hint)
    if not contexts:
        raise ValueError(f"{path} is not a kubeconfig, or has no contexts: {hint}")
    if context not in contexts:
        problem = f"has no context {context!r}" if context else "has no current-context"
        raise ValueError(f"{path} {problem}: choose one with --context ({', '.join(contexts)})")
    kubeconfig.load_kube_config(
        os.pathsep.join(files), context, configuration, persist_config=False
    )
    return configuration


def read_contexts(files: list[str], context: str | None, hint: str) -> tuple[str | None, list[str]]:
    """The context to use, and all that there are. As for kubectl, the first file that has a
    current-context decides."""
    contexts = []
    for file in files:
        content = next(iter(read_yaml(file)), None) or {}
        try:
            context = context or content.get("current-context")
            contexts += [str(each["name"]) for each in content.get("contexts") or ()]
        except (AttributeError, KeyError, TypeError):
            raise ValueError(f"{file} is not a kubeconfig: {hint}") from None
    return context and str(context), contexts


def read_yaml(file: str) -> list:
    """The documents in a YAML file (-: stdin). An error names the file and, if it can, the line."""
    name = "stdin" if file == "-" else file
    try:
        with open(0 if file == "-" else file, "rb") as stream:
            return list(yaml.safe_load_all(stream.read()))
    except OSError as error:
        raise OSError(f"cannot read {name}: {error.strerror}") from None
    except yaml.reader.ReaderError:
        raise ValueError(f"{name} is not text: check that it is the right file") from None
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        raise ValueError(f"{name} is not valid YAML: {error.problem} at {place}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{name} is not valid YAML: {error}") from None


def render(file: str) -> str:
    """The DaemonSets of the SchedExts in a YAML file (-: stdin), as YAML."""
    documents = [obj for obj in read_yaml(file) if isinstance(obj, dict)]
    for obj in list(documents):
        if isinstance(obj.get("items"), list):
            documents += [item for item in obj["items"] if isinstance(item, dict)]
    schedexts = [obj for obj in documents if obj.get("kind") == "SchedExt"]
    source = "stdin" if file == "-" else file
    if not schedexts:
        raise ValueError(f"{source} has no object of kind SchedExt")
    daemonsets = []
    for schedext in schedexts:
        try:
            daemonsets.append(build_daemonset(schedext, schedexts))
        except InvalidSpec as error:
            meta = schedext.get("metadata")
            name = meta.get("name") if isinstance(meta, dict) else ""
            raise ValueError(f"{source}: SchedExt {name or '?'}: {error}") from None
    return yaml.safe_dump_all(daemonsets, sort_keys=False)


def go_bool(text: str) -> bool:
    if text.lower() not in ("1", "t", "true", "0", "f", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("1", "t", "true")


def go_address(text: str) -> str:
    """An address in Go's form, or 0 for none."""
    if text != "0":
        port = text.rpartition(":")[2]
        if ":" not in text or not port.isdecimal() or int(port) > 65535:
            raise argparse.ArgumentTypeError(f"{text!r} is neither an address like :8081 nor 0")
    return text


def log_level(text: str) -> str:
    if not isinstance(logging.getLevelName(text.upper()), int):
        raise argparse.ArgumentTypeError(f"{text!r} is not debug, info, warning or error")
    return text.upper()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "sked", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    flag = parser.add_argument
    switch = {"nargs": "?", "const": True, "type": go_bool, "metavar": "BOOL"}
    flag("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, the pod's own, ~/.kube/config")
    flag("--context", help="use this context of the kubeconfig")
    flag("--namespace", default="", help="watch this namespace only")
    flag("--render", metavar="FILE", help="print its SchedExts as DaemonSets (-: stdin)")
    flag("--leader-elect", default=False, help="work only while holding the lease", **switch)
    flag(
        "--leader-election-namespace",
        metavar="NAMESPACE",
        help="where the lease is (default: the pod's own)",
    )
    flag(
        "--health-probe-bind-address",
        default=":8081",
        type=go_address,
        metavar="ADDRESS",
        help="where to serve /healthz and /readyz; 0: nowhere (default: :8081)",
    )
    flag(
        "--metrics-bind-address",
        default="0",
        type=go_address,
        metavar="ADDRESS",
        help="where to serve /metrics, such as :8443; 0: nowhere (default: 0)",
    )
    flag(
        "--metrics-secure",
        default=True,
        help="serve /metrics over HTTPS, to authorized callers only (default: true)",
        **switch,
    )
    flag(
        "--metrics-cert-dir",
        metavar="DIR",
        help="where tls.crt and tls.key for /metrics are (default: self-signed)",
    )
    flag(
        "--log-level",
        default="info",
        type=log_level,
        metavar="LEVEL",
        help="debug, info (default), warning or error",
    )
    for name in (  # the Go operator's, without effect: our log has one form, and we speak HTTP/1.1
        "enable-http2",
        "zap-devel",
        "zap-encoder",
        "zap-log-level",
        "zap-stacktrace-level",
        "zap-time-encoding",
    ):
        flag(f"--{name}", nargs="?", help=argparse.SUPPRESS)
    flag("--version", action="version", version=__version__)
    return parser.parse_args(argv)


def pod_namespace() -> str:
    try:
        with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
            return file.read().strip()
    except FileNotFoundError:
        message = "--leader-elect needs --leader-election-namespace outside a cluster"
        raise ValueError(message) from None


def listen(flag: str, address: str, *server: Any) -> None:
    """Start a Server, or say which flag chooses another address."""
    try:
        Server(address, *server)
    except OSError as error:
        problem = f"cannot listen on {address}: {error.strerror}"
        raise OSError(f"{problem}; choose another address with {flag}, or 0 for none") from None


def serve(args: argparse.Namespace, operator: Operator) -> None:
    """Start the HTTP servers that are asked for."""
    if args.health_probe_bind_address != "0":
        pages = {"/healthz": healthz, "/readyz": readyz}
        listen("--health-probe-bind-address", args.health_probe_bind_address, operator, pages)
    if args.metrics_bind_address == "0":
        return
    certificate = ""
    if args.metrics_secure:
        certificate = args.metrics_cert_dir or self_signed()
        server_tls(certificate)  # so that a bad one shows at the start
    pages = {"/metrics": metrics}
    listen("--metrics-bind-address", args.metrics_bind_address, operator, pages, certificate)


def run(args: argparse.Namespace) -> None:
    """Wire it up, and work until a signal arrives."""
    api = Api(lambda: load_configuration(args.kubeconfig, args.context))
    elector = None
    if args.leader_elect:
        elector = Elector(api, args.leader_election_namespace or pod_namespace())
    operator = Operator(api, args.namespace, elector)
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # in all threads: sigwait takes them
    serve(args, operator)
    gc.freeze()  # what is loaded by now is never garbage: that saves 10 % of CPU
    log.info(
        "sked %s: watching SchedExts in %s at %s",
        __version__,
        args.namespace or "all namespaces",
        api.host,
    )
    runner = spawn(functools.partial(elector.run, operator) if elector else operator.run, "runner")
    signal.sigwait(signals)
    operator.stop.set()
    runner.join(STOP_SECONDS)
    log.info("stopped")


def main(argv: list[str] | None = None) -> str | None:
    """Returns what went wrong, in one line."""
    args = parse(argv)
    logging.Formatter.converter = time.gmtime
    urllib3.disable_warnings()  # of a kubeconfig that says insecure-skip-tls-verify
    try:
        logging.basicConfig(
            level=args.log_level,
            format="%(asctime)sZ %(levelname)-7s %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )
        if args.render:
            print(render(args.render), end="")
        else:
            run(args)
    except KeyboardInterrupt:
        hint = " while reading stdin (end it with Ctrl-D)" if args.render == "-" else ""
        return f"sked: interrupted{hint}"
    except SETUP_OR_NETWORK_ERRORS as error:
        return f"sked: {' '.join(str(error).split())}"


if __name__ == "__main__":
    raise SystemExit(main())
