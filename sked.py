"""Run sched_ext schedulers on Kubernetes nodes: one SchedExt in, one DaemonSet out.

    API server --watch--> Reflector --key--> WorkQueue --> worker --> reconcile
    reconcile: build_daemonset -> create or patch -> build_status -> patch the status

Throughout this file:
    schedext   a SchedExt, as the plain dict that the API returns
    daemonset  a DaemonSet, likewise
    pod        the few facts that are kept of a scheduler's pod
    key        (namespace, name) of a SchedExt, and so of its DaemonSet
    selector   the pairs of a nodeSelector, as a set: of two that nest, the larger wins

Only keys travel through the queue. reconcile reads the caches and never asks which event woke it.
Each cache is written by one thread, its Reflector's. sked deletes nothing: owner references do.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import datetime
import functools
import gc
import heapq
import http.server
import itertools
import json
import logging
import math
import os
import queue
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import uuid
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import urllib3
import yaml
from kubernetes import config as kubeconfig
from kubernetes.client import Configuration
from kubernetes.client.rest import RESTClientObject
from kubernetes.utils.keepalive import tcp_keepalive_socket_options
from kubernetes.utils.quantity import parse_quantity

__version__ = "1.1.0"

Key = tuple[str, str]
Selector = frozenset[tuple[str, str]]

SCHEDEXTS = "/apis/sked.schedkit.io/v1{}/schedexts"
DAEMONSETS = "/apis/apps/v1{}/daemonsets"
PODS = "/api/v1{}/pods"
EVENTS = "/api/v1{}/events"
LEASES = "/apis/coordination.k8s.io/v1{}/leases"
LABEL, OURS = "managed-by", "sked-controller"  # on every DaemonSet and pod of sked's
SUSPENDED = "sked.schedkit.io/suspended"  # a label that no node has

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 30.0  # the API server takes no longer for anything but a watch
WATCH_SECONDS = 240  # then the API server ends a watch
RECONNECT_SECONDS = 8.0  # at most, between two tries: an outage is over within 10 s of its end
STUCK_SECONDS = 360.0  # a thread that shows no sign of life for this long hangs
TOKEN_SECONDS = 10.0  # between two looks at the token
PAGE_ITEMS = 100  # of a list
WORKERS = 4
GATHER_SECONDS = 1.0  # changes are gathered, and a SchedExt's status is written at most this often
SETTLE_SECONDS = 10.0  # a scheduler that cannot attach is Ready for 2 s at every try
BLOCKED_SECONDS = 60.0  # until another look at what somebody else has to change
RETRY_SECONDS = 300.0  # at most, between two tries of what fails or is undone again and again
LASTING = 4  # failures in a row: what is no refusal yet is told in the status all the same
MAX_TERMS = 100  # of a node affinity
MAX_FAILURES = 10  # listed in a status
MAX_CONNECTIONS = 64  # to each of our own HTTP servers

log = logging.getLogger("sked")


def backoff(failures: int, most: float) -> float:
    """Seconds to wait after so many failures in a row: 1, 2, 4, ..., with jitter."""
    return min(most, 2.0 ** min(failures - 1, 20)) * random.uniform(0.75, 1.0)


def timestamp(precision: str = "seconds") -> str:
    """Now, as the API writes it."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return now.isoformat(timespec=precision).replace("+00:00", "Z")


def seconds_since(stamp: str) -> float:
    then = datetime.datetime.fromisoformat(stamp.replace("Z", "+00:00"))
    return time.time() - then.timestamp()


def key_of(obj: dict) -> Key:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def path_to(resource: str, namespace: str, *names: str) -> str:
    scope = f"/namespaces/{namespace}" if namespace else ""
    return "/".join([resource.format(scope), *names])


def spawn(run: Callable[[], Any], name: str) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


# ---------------------------------------------------------------- the API server


class ApiError(Exception):
    """The API server refused (its HTTP status), or gave no usable answer (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


UNUSABLE = (
    urllib3.exceptions.HTTPError,
    OSError,
    ValueError,
    yaml.YAMLError,
    kubeconfig.ConfigException,
)


class Api:
    """Plain dicts to and from the API server; whatever goes wrong is an ApiError."""

    def __init__(self, configure: Callable[[], Configuration]) -> None:
        self.configure = configure
        self.metrics = Metrics()
        self.lock = threading.Lock()
        self.connect()

    def connect(self) -> None:
        """Read the configuration, and forget all connections and credentials."""
        self.configuration = self.configure()
        self.configuration.connection_pool_maxsize = WORKERS + 8
        self.configuration.socket_options = tcp_keepalive_socket_options(30, 10, 3)
        manager = RESTClientObject(self.configuration).pool_manager
        manager.connection_pool_kw["ssl_context"] = client_tls(self.configuration)
        for option in ("ca_certs", "ca_cert_data", "cert_file", "key_file"):
            manager.connection_pool_kw.pop(option, None)  # else each connection loads them again
        self.host = self.configuration.host.rstrip("/")
        self.pool = manager.connection_from_url(self.host)
        url = urllib.parse.urlsplit(self.host)
        self.base = self.host if url.scheme == "http" else url.path  # as an http:// proxy wants it
        self.must_connect = False  # anew: our credentials or certificates are out of date
        self.token_due = 0.0

    def authorization(self) -> dict:
        """The header that says who we are. It may change: a file or a plugin renews the token."""
        with self.lock:
            if self.must_connect:
                self.connect()
            if time.monotonic() >= self.token_due:
                setting = self.configuration.auth_settings().get("BearerToken", {})
                self.token = setting.get("value")
                self.token_due = time.monotonic() + TOKEN_SECONDS
            if self.token:
                return {"Authorization": self.token}
            if self.host.startswith("https:") and not self.configuration.cert_file:
                self.must_connect = True
                raise ValueError("the kubeconfig gives no credentials, does its plugin fail?")
            return {}

    def get(self, path: str, timeout: float = REQUEST_SECONDS) -> dict | None:
        """An object, or None where there is none."""
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
        timeout: float = REQUEST_SECONDS,
        **query: Any,
    ) -> dict:
        """The JSON that the API server answers."""
        with self.open(method, path, body, timeout, **query) as response:
            return json.loads(response.data)

    @contextlib.contextmanager
    def open(
        self, method: str, path: str, body: dict | None, timeout: float, **query: Any
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """The response to a request that succeeded; what goes wrong while it is read counts too."""
        kind = "merge-patch+json" if method == "PATCH" else "json"
        headers = {"Content-Type": f"application/{kind}", "User-Agent": f"sked/{__version__}"}
        status = 0
        try:
            headers |= self.authorization()  # which may connect anew
            response = self.pool.urlopen(
                method,
                f"{self.base}{path}?{urllib.parse.urlencode(query)}",
                body=json.dumps(body) if body else None,
                headers=headers,
                retries=False,
                assert_same_host=False,  # a proxy's differs
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, total=timeout),
                preload_content=False,
            )
            status = response.status
            with contextlib.closing(response):
                if status >= 300:
                    raise self.refusal(response)
                yield response
        except UNUSABLE as error:
            status = 0
            self.must_connect |= isinstance(error, urllib3.exceptions.SSLError)
            cause = str(error).rpartition(": ")[2].partition(" (")[0]  # the rest is urllib3's
            message = f"no usable answer from the API server at {self.host}: {cause}"
            raise ApiError(0, message) from error
        finally:
            self.metrics.add("rest_client_requests_total", code=status, method=method)

    def refusal(self, response: urllib3.BaseHTTPResponse) -> ApiError:
        self.must_connect |= response.status == 401
        text = response.data.decode(errors="replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["message"]
        return ApiError(response.status, text or f"HTTP status {response.status}")


def client_tls(configuration: Configuration) -> ssl.SSLContext:
    """One context for all connections, which loads the certificates before there is any."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # it refuses some hosted clusters
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


# ---------------------------------------------------------------- watching


class Reflector:
    """A cache of one resource that follows the API server."""

    RESOURCE = ""
    QUERY = {}

    def __init__(self, operator: Operator, namespace: str) -> None:
        self.operator = operator
        self.path = path_to(self.RESOURCE, namespace)
        self.name = self.path.rpartition("/")[2]
        self.items = {}  # by key
        self.groups = {}  # by group, then by key
        self.synced = threading.Event()

    def keep(self, obj: dict, old: Any) -> Any:
        """What the cache keeps of an object."""
        obj["metadata"].pop("managedFields", None)
        return {"spec": {}, "status": {}} | lean(obj)

    def groups_of(self, item: Any) -> set[Hashable]:
        """What an item can be found by, beside its key."""
        return set()

    def changed(self, old: Any, new: Any) -> None:
        """Queue the keys that a change concerns; what is not there is None."""
        raise NotImplementedError

    def select(self, group: Hashable) -> list:
        return list(self.groups.get(group, {}).values())

    def run(self) -> None:
        version, failures = "", 0
        while not self.operator.stop.is_set():
            try:
                version = self.watch(version or self.fill())
                failures = 0
            except Exception as error:
                version = ""
                failures += 1
                self.failed(error)
            # a moment also where all is well, for proxies that end each watch at once
            self.operator.stop.wait(backoff(failures, RECONNECT_SECONDS))

    def fill(self) -> str:
        """List all there is into the cache, and return the version to watch from."""
        items = dict.fromkeys(self.items)  # what is not in the list is gone
        query = self.QUERY | {"limit": PAGE_ITEMS}
        more = True
        while more:
            self.operator.beat()
            try:
                page = self.operator.api.request("GET", self.path, **query)
            except ApiError as error:
                if error.status == 404:
                    self.update(dict.fromkeys(self.items))  # with the CRD go all SchedExts
                raise
            for obj in page.get("items") or ():
                items[key_of(obj)] = self.keep(obj, self.items.get(key_of(obj)))
            more = query["continue"] = page["metadata"].get("continue")
        self.update(items)
        self.synced.set()
        return page["metadata"]["resourceVersion"]

    def watch(self, version: str) -> str:
        """Follow the changes since a version, and return the last version seen.

        Empty where nothing came, not even a bookmark: that is how some servers answer to a
        version from before they were restored from a backup.
        """
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": WATCH_SECONDS}
        query |= self.QUERY | {"resourceVersion": version}
        timeout = WATCH_SECONDS + REQUEST_SECONDS
        last = ""
        self.operator.beat()
        with self.operator.api.open("GET", self.path, None, timeout, **query) as response:
            self.operator.report(self.name, "")
            for line in response:
                self.operator.beat()
                last = self.handle(json.loads(line))
        return last

    def handle(self, event: dict) -> str:
        """One event of a watch; returns its version."""
        kind, obj = event["type"], event["object"]
        if kind == "ERROR":
            raise ApiError(obj.get("code", 0), obj.get("message", "the watch failed"))
        if kind != "BOOKMARK":
            key = key_of(obj)
            item = None if kind == "DELETED" else self.keep(obj, self.items.get(key))
            self.update({key: item})
        return obj["metadata"]["resourceVersion"]

    def update(self, items: dict) -> None:
        """Put all of them (None: it is gone), then tell: nobody works on half a list."""
        changes = [(self.items.get(key), item) for key, item in items.items()]
        for key, item in items.items():
            self.put(key, item)
        for old, new in changes:
            if old != new:
                self.changed(old, new)

    def put(self, key: Key, item: Any) -> None:
        """In such an order that readers find the old item or the new one, never none."""
        old = self.items.get(key)
        before = self.groups_of(old) if old else set()
        after = self.groups_of(item) if item else set()
        for group in after:
            self.groups.setdefault(group, {})[key] = item
        for group in before - after:
            del self.groups[group][key]
            if not self.groups[group]:
                del self.groups[group]
        if item:
            self.items[key] = item
        else:
            self.items.pop(key, None)

    def failed(self, error: Exception) -> None:
        if not isinstance(error, ApiError):
            log.error("%s: bug in the watch loop", self.name, exc_info=error)
        elif error.status == 404:
            hint = "install the CRD with 'kubectl apply -f install.yaml'"
            self.operator.report(self.name, f"the API server knows no {self.name}: {hint}")
        elif error.status != 410:  # which only says that the version is too old
            self.operator.report(self.name, str(error))


def lean(value: Any) -> Any:
    """The same, its keys shared with all others in the caches: that halves them."""
    if isinstance(value, dict):
        return {sys.intern(key): lean(field) for key, field in value.items()}
    if isinstance(value, list):
        return [lean(item) for item in value]
    return value


class SchedExts(Reflector):
    RESOURCE = SCHEDEXTS

    def groups_of(self, schedext: dict) -> set[Hashable]:
        return {selector_of(schedext)}

    def changed(self, old: dict | None, new: dict | None) -> None:
        """A SchedExt matters to itself and, where its selector is news, to those that yield."""
        self.operator.queue.add(key_of(new or old))
        selectors = {selector_of(schedext) for schedext in (old, new) if schedext}
        if old and new and len(selectors) == 1:
            return
        for loser in list(self.groups):
            if any(loser < selector for selector in selectors):
                for schedext in self.select(loser):
                    # at once, so that the kernel is free when the other one's scheduler comes;
                    # where that one goes, its pods need a moment
                    self.operator.queue.add(key_of(schedext), 0.0 if new else GATHER_SECONDS)


class DaemonSets(Reflector):
    RESOURCE = DAEMONSETS
    QUERY = {"labelSelector": f"{LABEL}={OURS}"}

    def changed(self, old: dict | None, new: dict | None) -> None:
        """Drift is undone at once. All else can wait, also that it is gone: the deletion of its
        SchedExt may not have reached the watch yet."""
        is_edit = old and new and old["metadata"]["generation"] < new["metadata"]["generation"]
        self.operator.queue.add(key_of(new or old), 0.0 if is_edit else GATHER_SECONDS)


class Pods(Reflector):
    RESOURCE = PODS
    QUERY = {"labelSelector": f"{LABEL}={OURS}"}

    def keep(self, obj: dict, old: Pod | None) -> Pod:
        return keep_pod(obj, old)

    def groups_of(self, pod: Pod) -> set[Hashable]:
        return {pod.owner, pod.node}

    def changed(self, old: Pod | None, new: Pod | None) -> None:
        """A pod matters to its own SchedExt and to others that try to attach on its node."""
        for pod in filter(None, (old, new)):
            for owner in {pod.owner, *(other.owner for other in self.select(pod.node))}:
                self.operator.queue.add(owner, GATHER_SECONDS)


# ---------------------------------------------------------------- the queue


class WorkQueue:
    """Keys to work on: each waits at most once, and never goes to two workers at a time."""

    def __init__(self) -> None:
        self.due = {}  # when, by key
        self.heap = []  # (when, key), the earliest first; stale unless when is due[key]
        self.busy = set()
        self.failures = {}  # how many in a row, by key
        self.changed = threading.Condition()

    def add(self, key: Key, after: float = 0.0) -> None:
        """Work on a key in so many seconds, or sooner if it is due sooner."""
        with self.changed:
            when = time.monotonic() + after
            if when < self.due.get(key, math.inf):
                self.due[key] = when
                self.offer(key)

    def offer(self, key: Key) -> None:
        if key in self.due and key not in self.busy:
            heapq.heappush(self.heap, (self.due[key], key))
            self.changed.notify()

    def get(self, timeout: float) -> Key | None:
        """A key that is due; None if there is none, after waiting for one to be."""
        with self.changed:
            while self.heap and self.due.get(self.heap[0][1]) != self.heap[0][0]:
                heapq.heappop(self.heap)
            when, key = self.heap[0] if self.heap else (math.inf, None)
            wait = when - time.monotonic()
            if wait > 0:
                self.changed.wait(min(wait, timeout))
                return None
            heapq.heappop(self.heap)
            del self.due[key]
            self.busy.add(key)
            return key

    def done(self, key: Key) -> None:
        with self.changed:
            self.busy.remove(key)
            self.offer(key)

    def retry(self, key: Key) -> int:
        """Work on a key that failed again, later each time; returns how often it has failed."""
        self.failures[key] = self.failures.get(key, 0) + 1
        self.add(key, backoff(self.failures[key], RETRY_SECONDS))
        return self.failures[key]

    def depth(self) -> int:
        """How many keys wait for a worker."""
        with self.changed:
            now = time.monotonic()
            return sum(when <= now for when in self.due.values())

    def wake(self) -> None:
        """Have all that wait for a key look up."""
        with self.changed:
            self.changed.notify_all()


# ---------------------------------------------------------------- reconcile


class Blocked(Exception):
    """Why the DaemonSet cannot be as it should: reason and message for the status."""

    def __init__(self, reason: str, message: str, look_again: float = BLOCKED_SECONDS) -> None:
        super().__init__(message)
        self.reason = reason
        self.look_again = look_again  # in so many seconds


class Memory:
    """What is remembered of a SchedExt; a restart may forget it."""

    def __init__(self) -> None:
        self.asked = False  # for a DaemonSet
        self.wrote = -math.inf  # when something was written for it last
        self.podless_since = None  # when nodes were first seen to want pods while there is none
        self.wanted = None  # hash of the DaemonSet that was wanted last
        self.repairs = {}  # of that one, by what was wrong: how often in a row, and not before when


class Operator:
    """The caches, the queue, and the work on one key."""

    def __init__(
        self, api: Api, namespace: str = "", before_write: Callable[[], None] = lambda: None
    ) -> None:
        self.api = api
        self.before_write = before_write
        self.stop = threading.Event()
        self.queue = WorkQueue()
        self.events = queue.SimpleQueue()
        self.memory = defaultdict(Memory)  # by key
        self.beats = {}  # the last sign of life, by thread
        self.faults = {}  # of the API server, by who met it
        self.lock = threading.Lock()
        self.schedexts = SchedExts(self, namespace)
        self.daemonsets = DaemonSets(self, namespace)
        self.pods = Pods(self, namespace)
        self.reflectors = (self.schedexts, self.daemonsets, self.pods)

    def run(self) -> bool:
        """Work until stop is set; returns whether all work has ended then."""
        for reflector in self.reflectors:
            spawn(reflector.run, reflector.name)
        while not self.ready() and not self.stop.wait(0.01):
            pass
        spawn(self.send_events, "events")
        workers = [spawn(self.work, f"worker-{n}") for n in range(WORKERS)]
        self.stop.wait()
        for worker in workers:
            self.queue.wake()
            worker.join(0.8 / WORKERS)
        return not any(worker.is_alive() for worker in workers)

    def ready(self) -> bool:
        return all(reflector.synced.is_set() for reflector in self.reflectors)

    def beat(self) -> None:
        """A sign of life of the thread that calls it."""
        self.beats[threading.current_thread()] = time.monotonic()

    def report(self, who: str, fault: str) -> None:
        """Log a fault when it is news, and when nobody has one any more."""
        with self.lock:
            before = self.faults.pop(who, "")
            if fault and fault != before and fault not in self.faults.values():
                log.warning("%s; trying again", fault)
            if fault:
                self.faults[who] = fault
            elif before and not self.faults:
                log.info("the API server answers again")
                for key in list(self.queue.failures):
                    self.queue.failures[key] = 0
                    self.queue.add(key)

    def work(self) -> None:
        while not self.stop.is_set():
            self.beat()
            if key := self.queue.get(timeout=REQUEST_SECONDS):
                self.process(key)

    def process(self, key: Key) -> None:
        """Reconcile, and see to it that the key comes again: the one place where errors end."""
        started, result = time.monotonic(), "success"
        try:
            look_again = self.reconcile(key)
            self.queue.failures.pop(key, None)
            if look_again < math.inf:
                self.queue.add(key, look_again)
        except Exception as error:
            result = "error"
            failures = self.queue.retry(key)
            if not isinstance(error, ApiError):
                log.exception("%s/%s: bug", *key)
            elif failures == 1:
                log.warning("%s/%s: %s; trying again", *key, error)
        self.queue.done(key)
        self.api.metrics.reconciled(result, time.monotonic() - started)

    def reconcile(self, key: Key) -> float:
        """Make the DaemonSet and the status of one SchedExt what they should be.

        Writes at most once: the DaemonSet at once, the status not within a second of the last
        write for that key. Returns the seconds until another look is due.
        """
        schedext = self.schedexts.items.get(key)
        if not schedext or "deletionTimestamp" in schedext["metadata"]:
            self.memory.pop(key, None)
            return math.inf
        blocked = None
        try:
            if self.apply(key, schedext):
                return GATHER_SECONDS
        except Blocked as error:
            blocked = error
        view = self.look(key, schedext)
        status = build_status(view, blocked, timestamp())
        if status != schedext["status"]:
            early = self.memory[key].wrote + GATHER_SECONDS - time.monotonic()
            if early > 0:
                return early
            self.write_status(key, schedext, status)
        waits = [pod.since - view.settled_before for pod in view.pods]  # until they settle
        waits.append(SETTLE_SECONDS if self.memory[key].podless_since else math.inf)
        waits.append(blocked.look_again if blocked else math.inf)
        return max(GATHER_SECONDS, min(wait for wait in waits if wait > 0))

    def apply(self, key: Key, schedext: dict) -> bool:
        """Create or patch the DaemonSet where needed; returns whether to look again soon."""
        try:
            want = build_daemonset(schedext, self.winners(schedext))
            have = self.find(key, schedext)
            if have:
                check_control(schedext, have)
                return self.patch(key, schedext, have, want)
            self.memory[key].asked = True
            with self.paced(key, want, "deleting the DaemonSet"):
                self.write(key, "POST", path_to(DAEMONSETS, key[0]), want)
            log.info("%s/%s: created the DaemonSet", *key)
            return True
        except ValueError as error:
            raise Blocked("Rejected", str(error)) from None
        except ApiError as error:
            if error.status in (404, 409) or "is being terminated" in str(error):
                return True  # the cache is behind, or the namespace goes, and the SchedExt with it
            if error.status in (400, 403, 422) or self.queue.failures.get(key, 0) > LASTING:
                message = f"the API server refused the DaemonSet: {str(error)[:1000]}"
                raise Blocked("Rejected", message) from None
            raise

    def winners(self, schedext: dict) -> list[dict]:
        """A SchedExt for each selector that is more specific."""
        mine = selector_of(schedext)
        selectors = [selector for selector in list(self.schedexts.groups) if selector > mine]
        return [winner for selector in selectors for winner in self.schedexts.select(selector)[:1]]

    def find(self, key: Key, schedext: dict) -> dict | None:
        """The DaemonSet. One that lacks our label is not in the cache; a new SchedExt has none."""
        have = self.daemonsets.items.get(key)
        if not have and (schedext["status"] or self.memory[key].asked):
            have = self.api.get(path_to(DAEMONSETS, *key))
        return have

    def patch(self, key: Key, schedext: dict, have: dict, want: dict) -> bool:
        """Make the DaemonSet as wanted; returns whether there was anything to do."""
        parked = park(want, have, self.pods.select(key))
        fields = differences(parked, have)
        if not fields:
            return False
        what = f"{', '.join(fields)} of the DaemonSet"
        with self.paced(key, want, f"changing {what}") as times:
            self.write(key, "PATCH", path_to(DAEMONSETS, *key), daemonset_patch(have, parked))
        if times == 1:
            log.info("%s/%s: patched %s", *key, what)
            if is_drift(schedext, fields):
                event = build_event(schedext, "DriftUndone", f"put back {what}", timestamp())
                self.events.put(event)
        elif times == 3:  # a second time may be a watch that lags
            log.warning("%s/%s: somebody keeps changing %s", *key, what)
        return True

    @contextlib.contextmanager
    def paced(self, key: Key, want: dict, doing: str) -> Iterator[int]:
        """Around a repair of the DaemonSet; yields how often in a row it is needed.

        Somebody may want it otherwise, for good: another controller, a webhook, a script. So a
        repair that is needed again soon after the last time waits longer each time.
        """
        memory, now = self.memory[key], time.monotonic()
        wanted = hash(json.dumps(want))
        if memory.wanted != wanted:
            memory.wanted = wanted
            memory.repairs.clear()
        times, not_before = memory.repairs.get(doing, (0, -math.inf))
        if now < not_before:
            message = (
                f"somebody keeps {doing}: sked has put it back {times} times in a row, and does so "
                "ever more rarely; who it is may show in "
                f"'kubectl get ds -n {key[0]} {key[1]} -o yaml --show-managed-fields'"
            )
            raise Blocked("RollingOut", message, not_before - now)
        if now > not_before + BLOCKED_SECONDS:
            times = 0
        yield times + 1
        memory.repairs[doing] = (times + 1, now + backoff(times + 1, RETRY_SECONDS))

    def look(self, key: Key, schedext: dict) -> View:
        """What there is of a SchedExt now."""
        memory, now = self.memory[key], time.monotonic()
        settled_before = now - settle_seconds(schedext)
        daemonset, pods = self.daemonsets.items.get(key), self.pods.select(key)
        if not daemonset or not controls(schedext, daemonset):
            daemonset, pods = NO_DAEMONSET, []
        is_podless = not pods and daemonset["status"].get("desiredNumberScheduled", 0) > 0
        if not is_podless:
            memory.podless_since = None
        elif memory.podless_since is None:
            told = ready_condition(schedext).get("reason") == "NodesFailing"  # before a restart
            memory.podless_since = -math.inf if told else now
        pods = [pod for pod in pods if not pod.leaving]
        rivals = {
            pod.node: "/".join(other.owner)
            for pod in pods
            if pod.fails(settled_before)
            for other in self.pods.select(pod.node)
            if other.owner != key and other.started and not other.fails(settled_before)
        }
        podless_seconds = now - memory.podless_since if is_podless else 0.0
        return View(schedext, daemonset, pods, rivals, settled_before, podless_seconds)

    def write_status(self, key: Key, schedext: dict, status: dict) -> None:
        version = schedext["metadata"]["resourceVersion"]  # for the conditions are one list
        patch = {"metadata": {"resourceVersion": version}, "status": {"failures": None} | status}
        try:
            self.write(key, "PATCH", path_to(SCHEDEXTS, *key, "status"), patch)
        except ApiError as error:
            if error.status not in (404, 409):  # it went or changed: the watch will say so
                raise
            return
        ready = ready_condition({"status": status})
        reason, message = ready["reason"], ready["message"]
        if reason == ready_condition(schedext).get("reason"):
            return
        if reason in ("NodesFailing", "NameTaken", "Rejected"):
            log.warning("%s/%s: %s: %s", *key, reason, message)
            self.events.put(build_event(schedext, reason, message, timestamp()))
        else:
            log.info("%s/%s: %s: %s", *key, reason, message)

    def send_events(self) -> None:
        """Events hold nothing up, and one that cannot be sent is dropped."""
        while not self.stop.is_set():
            event = self.events.get()
            path = path_to(EVENTS, event["metadata"]["namespace"])
            with contextlib.suppress(ApiError):
                self.before_write()
                self.api.request("POST", path, event)

    def write(self, key: Key, method: str, path: str, body: dict) -> None:
        self.before_write()
        self.api.request(method, path, body)
        self.memory[key].wrote = time.monotonic()


def build_event(schedext: dict, reason: str, message: str, now: str) -> dict:
    meta = schedext["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": "sked.schedkit.io/v1",
            "kind": "SchedExt",
            **{field: meta[field] for field in ("namespace", "name", "uid")},
        },
        "type": "Warning",
        "reason": reason,
        "message": message[:1024],
        "count": 1,
        "source": {"component": "sked"},
        "firstTimestamp": now,
        "lastTimestamp": now,
    }


def controller_of(daemonset: dict) -> dict:
    owners = daemonset["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), {})


def controls(schedext: dict, daemonset: dict) -> bool:
    return controller_of(daemonset).get("uid") == schedext["metadata"]["uid"]


def check_control(schedext: dict, daemonset: dict) -> None:
    """Raise Blocked where the DaemonSet is on its way out, or somebody else's."""
    namespace, name = key_of(schedext)
    owner = controller_of(daemonset)
    ours = controls(schedext, daemonset)
    is_predecessors = not ours and (owner.get("kind"), owner.get("name")) == ("SchedExt", name)
    if is_predecessors or "deletionTimestamp" in daemonset["metadata"]:
        raise Blocked("RollingOut", f"waiting until the old DaemonSet {name} is gone")
    orphan = not owner and daemonset["metadata"].get("labels", {}).get(LABEL) == OURS
    adoptable = orphan and daemonset["spec"]["selector"] == {"matchLabels": {"name": name}}
    if not ours and not adoptable:
        whose = f"belongs to {owner['kind']} {owner['name']}" if owner else "is not sked's"
        raise Blocked(
            "NameTaken",
            f"a DaemonSet {name} exists and {whose}: give this SchedExt another name, or remove "
            f"that DaemonSet with 'kubectl delete daemonset -n {namespace} {name}'",
        )


# ---------------------------------------------------------------- build_daemonset

POD_FIELDS = ("nodeSelector", "tolerations", "priorityClassName", "imagePullSecrets", "hostPID")
CONTAINER_FIELDS = ("imagePullPolicy", "args", "env", "resources", "terminationMessagePolicy")
DAEMONSET_FIELDS = ("updateStrategy", "minReadySeconds")


def build_daemonset(schedext: dict, yields_to: Iterable[dict] = ()) -> dict:
    """The DaemonSet of a SchedExt, off the nodes of the more specific ones in yields_to.

    ValueError where the spec makes no DaemonSet.
    """
    meta, spec = schedext.get("metadata"), schedext.get("spec")
    if not isinstance(meta, dict) or not meta.get("name"):
        raise ValueError("metadata.name is missing")
    sched = spec.get("sched") if isinstance(spec, dict) else None
    if not isinstance(sched, str) or not sched.strip():
        raise ValueError("spec.sched is missing: it names the image of a scheduler")

    def given(fields: tuple[str, ...]) -> dict:
        return {field: spec[field] for field in fields if spec.get(field) is not None}

    owner = {
        "apiVersion": "sked.schedkit.io/v1",
        "kind": "SchedExt",
        "name": meta["name"],
        "uid": meta.get("uid"),
        "controller": True,
        "blockOwnerDeletion": True,
    }
    container = {
        "name": "scx",
        "image": sched,
        **given(CONTAINER_FIELDS),
        "securityContext": {"privileged": True},
    }
    pod = {"containers": [container], **given(POD_FIELDS)}
    daemonset = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": meta["name"], "labels": {LABEL: OURS}},
        "spec": {
            "selector": {"matchLabels": {"name": meta["name"]}},
            **given(DAEMONSET_FIELDS),
            "template": {
                "metadata": {"labels": {"name": meta["name"], LABEL: OURS}},
                "spec": pod,
            },
        },
    }
    if meta.get("namespace"):
        daemonset["metadata"]["namespace"] = meta["namespace"]
    if meta.get("uid"):  # a manifest that was never applied has none
        daemonset["metadata"]["ownerReferences"] = [owner]
    if spec.get("hostPaths"):
        named = {f"host-{n}": path for n, path in enumerate(spec["hostPaths"])}
        container["volumeMounts"] = [{"name": n, "mountPath": named[n]} for n in named]
        pod["volumes"] = [{"name": n, "hostPath": {"path": named[n]}} for n in named]
    if spec.get("suspend"):
        pod["nodeSelector"] = pod.get("nodeSelector", {}) | {SUSPENDED: "true"}
    if affinity := node_affinity(selector_of(schedext), map(selector_of, yields_to)):
        pod["affinity"] = affinity
    return daemonset


def selector_of(schedext: dict) -> Selector:
    """None of its pairs where it is no selector, which a lax CRD may let in."""
    spec = schedext.get("spec")
    pairs = spec.get("nodeSelector") if isinstance(spec, dict) else None
    items = pairs.items() if isinstance(pairs, dict) else ()
    return frozenset((key, str(value)) for key, value in items)


def node_affinity(mine: Selector, others: Iterable[Selector]) -> dict | None:
    """What keeps off the nodes of the others that are more specific.

    A node is not another's if it lacks one of that one's extra pairs. So there is a term (terms
    are ORed) for each way to choose one extra pair of every winner.
    """
    winners = {other for other in others if other > mine}
    if not winners:
        return None
    terms = {frozenset()}
    for winner in sorted(winners, key=lambda winner: (len(winner), sorted(winner))):
        terms = {term | {pair} for term in terms for pair in winner - mine}
        terms = {term for term in terms if not any(wider < term for wider in terms)}
        if len(terms) > MAX_TERMS:
            raise ValueError(
                f"too many node pools: to yield to the SchedExts with a more specific nodeSelector "
                f"takes more than {MAX_TERMS} affinity terms, so the DaemonSet stays as it is: "
                "tell the pools apart by the values of one label"
            )
    rules = {"nodeSelectorTerms": [not_in(term) for term in sorted(terms, key=sorted)]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": rules}}


def not_in(pairs: Selector) -> dict:
    """The affinity term for nodes that have none of the pairs."""
    by_key = itertools.groupby(sorted(pairs), key=lambda pair: pair[0])
    return {
        "matchExpressions": [
            {"key": key, "operator": "NotIn", "values": [value for _, value in group]}
            for key, group in by_key
        ]
    }


# ---------------------------------------------------------------- create or patch

BLANK = (None, "", [], {})
WHOLE = ("labels", "matchLabels", "nodeSelector", "affinity")  # the API server adds nothing
DEFAULTS = {  # what it fills in elsewhere, beside blanks
    "revisionHistoryLimit": 10,
    "minReadySeconds": 0,
    "hostPID": False,
    "maxSurge": 0,
    "type": "RollingUpdate",
    "maxUnavailable": 1,
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": 30,
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
    "apiVersion": "v1",
    "divisor": "0",
}


def differences(want: dict, have: dict) -> list[str]:
    """The fields in which a DaemonSet is not as wanted."""
    found = set(differing("spec", want["spec"], have["spec"]))
    if have["metadata"].get("labels", {}).get(LABEL) != OURS:
        found.add("metadata.labels")
    if want["metadata"]["ownerReferences"][0] not in have["metadata"].get("ownerReferences", ()):
        found.add("metadata.ownerReferences")
    return sorted(found)


def differing(path: str, want: Any, have: Any) -> Iterator[str]:
    """Where a part of a DaemonSet is not what we set or, where we set nothing, the default."""
    field = path.rpartition(".")[2]
    if field == "annotations" or want == have:
        return
    if isinstance(want or have, dict) and field not in WHOLE:
        want, have = want or {}, have or {}
        for name in want.keys() | have.keys():
            mine, theirs = want.get(name), have.get(name)
            if mine != theirs:
                default = default_of(name, want)
                mine = default if mine in BLANK else mine
                theirs = default if theirs in BLANK else theirs
                yield from differing(f"{path}.{name}", mine, theirs)
    elif isinstance(want, list) and isinstance(have, list) and len(want) == len(have):
        for mine, theirs in zip(want, have):
            yield from differing(path, mine, theirs)
    elif not is_amount(path) or quantity(want) != quantity(have):
        yield path


def is_amount(path: str) -> bool:
    return ".resources." in path or path.endswith(".divisor")


def quantity(amount: Any) -> int | None:
    """In thousandths, rounded up: the API server makes 500m of 0.5."""
    return None if amount is None else math.ceil(1000 * parse_quantity(str(amount)))


def default_of(field: str, part: dict) -> Any:
    """What the API server fills in for a field that is not set in this part of a DaemonSet."""
    if field == "imagePullPolicy":
        return default_pull_policy(str(part.get("image")))
    return DEFAULTS.get(field)


def default_pull_policy(image: str) -> str:
    name, digest, _ = image.rpartition("/")[2].partition("@")
    tag = name.partition(":")[2]
    return "Always" if tag == "latest" or not (tag or digest) else "IfNotPresent"


def is_drift(schedext: dict, fields: list[str]) -> bool:
    """Whether somebody else changed these fields: neither its SchedExt nor a node pool did."""
    pools = ("spec.template.spec.affinity", "spec.updateStrategy")
    same_spec = schedext["status"].get("observedGeneration") == schedext["metadata"]["generation"]
    return same_spec and not all(field.startswith(pools) for field in fields)


def park(want: dict, have: dict, pods: list[Pod]) -> dict:
    """What to ask for: want, but OnDelete where its pods differ from it in the affinity only.

    A running pod need not follow a change of the affinity, which only says who has which node:
    the DaemonSet controller takes pods off the excluded nodes whatever the strategy. The next
    change of anything else brings the wanted strategy back, and all pods follow.
    """
    affinity = want["spec"]["template"]["spec"].get("affinity")
    template = have["spec"]["template"]
    but_for_affinity = template | {"spec": template["spec"] | {"affinity": affinity}}
    if not pods or any(differing("template", want["spec"]["template"], but_for_affinity)):
        return want
    nodes_change_hands = affinity != template["spec"].get("affinity")
    if nodes_change_hands and not is_observed(have) and not has_on_delete(have):
        raise Blocked("RollingOut", "waiting for the DaemonSet controller", GATHER_SECONDS)
    if is_rolled_out(have):
        parks = nodes_change_hands
    else:
        parks = has_on_delete(have) and len(current_of(pods, have)) == len(pods)
    if parks:
        return want | {"spec": want["spec"] | {"updateStrategy": {"type": "OnDelete"}}}
    return want


def has_on_delete(obj: dict) -> bool:
    return obj["spec"].get("updateStrategy", {}).get("type") == "OnDelete"


def is_observed(daemonset: dict) -> bool:
    """Whether its status speaks of its current spec."""
    seen = daemonset["status"].get("observedGeneration", 0)
    return seen == daemonset["metadata"]["generation"]


def is_rolled_out(daemonset: dict) -> bool:
    """Whether every pod is of the current template."""
    current = daemonset["status"].get("currentNumberScheduled", 0)
    updated = daemonset["status"].get("updatedNumberScheduled", 0)
    return is_observed(daemonset) and updated == current


def current_of(pods: list[Pod], daemonset: dict) -> list[Pod]:
    """The pods that run what the DaemonSet says, whatever its affinity was when they began."""
    notes = daemonset["metadata"].get("annotations", {})
    revision = notes.get("deprecated.daemonset.template.generation")
    runs = what_runs(daemonset["spec"]["template"])
    return [pod for pod in pods if pod.revision == revision or pod.runs == runs]


def daemonset_patch(have: dict, want: dict) -> dict:
    """What makes a DaemonSet as wanted, and never another one that took its name."""
    meta = {"uid": have["metadata"]["uid"], "labels": {LABEL: OURS}}
    owners = have["metadata"].get("ownerReferences", [])
    [ours] = want["metadata"]["ownerReferences"]
    if ours not in owners:
        others = [owner for owner in owners if owner["uid"] != ours["uid"]]
        meta["ownerReferences"] = [*others, ours]
        meta["resourceVersion"] = have["metadata"]["resourceVersion"]
    return {"metadata": meta, "spec": merge_patch(have["spec"], want["spec"])}


def merge_patch(have: Any, want: Any) -> Any:
    """The JSON merge patch that leaves of have only what is in want: null removes."""
    if not isinstance(have, dict) or not isinstance(want, dict):
        return want
    gone = have.keys() - want.keys() - {"annotations"}
    return dict.fromkeys(gone) | {
        field: merge_patch(have.get(field), want[field]) for field in want
    }


# ---------------------------------------------------------------- build_status


class Pod(NamedTuple):
    """What is kept of a pod."""

    owner: Key
    name: str
    node: str
    revision: str | None  # of the template that it was made from
    runs: int  # the same for all that run the same
    started: str | None  # when its container came up, by the node's clock; None while it is not up
    since: float  # the same by ours, and infinite while it is not up
    reason: str  # of its last failure, also once it is up again
    message: str
    leaving: bool

    def fails(self, settled_before: float) -> bool:
        """A container that restarted fails until it settles, so a crash loop does so steadily."""
        return bool(self.reason) and self.since > settled_before


def keep_pod(obj: dict, old: Pod | None) -> Pod:
    meta, spec, status = obj["metadata"], obj["spec"], obj.get("status") or {}
    owners = [o["name"] for o in meta.get("ownerReferences") or () if o.get("controller")]
    container = scx(status.get("containerStatuses"))
    started = None
    if condition(status, "Ready").get("status") == "True":
        started = (container.get("state", {}).get("running") or {}).get("startedAt")
    reason, message = pod_problem(meta, status, container)
    return Pod(
        owner=(meta["namespace"], owners[0] if owners else ""),
        name=meta["name"],
        node=spec.get("nodeName") or target_node(spec),
        revision=(meta.get("labels") or {}).get("pod-template-generation"),
        runs=what_runs(obj),
        started=started,
        since=up_since(started, old),
        reason=reason,
        message=message,
        leaving="deletionTimestamp" in meta,
    )


def scx(containers: list[dict] | None) -> dict:
    """Our container: somebody may have injected others."""
    return next((c for c in containers or () if c["name"] == "scx"), {})


def what_runs(pod: dict) -> int:
    """Equal for pods and templates that run the same.

    By what admission hardly ever changes in pods, so not by their resources or tolerations.
    """
    spec, notes = pod["spec"], pod["metadata"].get("annotations") or {}
    container = scx(spec.get("containers"))
    parts = [container.get(field) for field in ("image", "args", "env")]
    parts += [volume for volume in spec.get("volumes") or () if "hostPath" in volume]
    parts += [spec.get("hostPID"), notes.get("kubectl.kubernetes.io/restartedAt")]
    return hash(json.dumps(parts))


def condition(status: dict, kind: str) -> dict:
    return next((c for c in status.get("conditions") or () if c["type"] == kind), {})


def ready_condition(schedext: dict) -> dict:
    return condition(schedext["status"], "Ready")


def up_since(started: str | None, old: Pod | None) -> float:
    """When a container came up, by time.monotonic().

    One that is seen to come up counts from then, for the node's clock may be wrong. One that was
    up when sked first looked counts from its startedAt, so that a restart of sked changes nothing.
    """
    if not started:
        return math.inf
    if not old:
        return time.monotonic() - max(0.0, seconds_since(started))
    return old.since if old.started == started else time.monotonic()


def target_node(spec: dict) -> str:
    """The node that a DaemonSet's pod is for while it is not bound to it."""
    with contextlib.suppress(KeyError, IndexError):
        rules = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return rules["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
    return ""


def pod_problem(meta: dict, status: dict, container: dict) -> tuple[str, str]:
    """Reason and message of what is wrong with a pod, or was before its container restarted."""
    state, last = container.get("state") or {}, container.get("lastState") or {}
    waiting = state.get("waiting") or {}
    died = state.get("terminated") or last.get("terminated") or {}
    restarts = container.get("restartCount", 0)
    crashed = died or restarts or waiting.get("reason") == "CrashLoopBackOff"
    begins = ("ContainerCreating", "PodInitializing", "CrashLoopBackOff")
    scheduled = condition(status, "PodScheduled")
    if status.get("phase") == "Failed" and status.get("reason"):
        return status["reason"], status.get("message", "")
    if waiting.get("reason") and waiting["reason"] not in begins:
        return waiting["reason"], waiting.get("message", "")
    if crashed:
        return "CrashLoopBackOff", crash_message(meta, died, restarts)
    if scheduled.get("reason") == "Unschedulable":
        return "Unschedulable", scheduled.get("message", "")
    return "", ""


def crash_message(meta: dict, died: dict, restarts: int) -> str:
    message = f"exit code {died.get('exitCode', 'unknown')}"
    if died.get("reason") not in (None, "Error"):
        message += f" ({died['reason']})"
    message += f", {restarts} restart{'' if restarts == 1 else 's'}"
    if died.get("message"):
        message += ": " + " ".join(died["message"].split())[-300:]
    previous = " --previous" if restarts else ""
    return f"{message}; see 'kubectl logs -n {meta['namespace']} {meta['name']}{previous}'"


def settle_seconds(schedext: dict) -> float:
    """How long a container must stay up before it counts as ready."""
    return max(SETTLE_SECONDS, schedext["spec"].get("minReadySeconds") or 0)


NO_DAEMONSET = {"metadata": {"generation": 1}, "spec": {}, "status": {}}


class View(NamedTuple):
    """One SchedExt and what there is of it, at one moment."""

    schedext: dict
    daemonset: dict
    pods: list[Pod]
    rivals: dict[str, str]  # nodes where its pod fails and another SchedExt's runs: whose
    settled_before: float  # a container that came up by then has stayed up for long enough
    podless_seconds: float  # for how long nodes have wanted pods while there was none


def build_status(view: View, blocked: Blocked | None, now: str) -> dict:
    """The status of a SchedExt."""
    schedext, generation = view.schedext, view.schedext["metadata"]["generation"]
    failing = [pod for pod in view.pods if pod.fails(view.settled_before)]
    failing.sort(key=lambda pod: (pod.node, pod.name))
    failures = [build_failure(pod, view.rivals) for pod in failing]
    nodes = count_nodes(view, len(failures))
    if blocked:
        reason, message = blocked.reason, str(blocked)
    else:
        reason, message = ready_reason(view, nodes, failures)
    ready = {
        "type": "Ready",
        "status": "True" if reason == "AllReady" else "False",
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": now,
    }
    before = ready_condition(schedext)
    if before.get("status") == ready["status"]:
        ready["lastTransitionTime"] = before.get("lastTransitionTime", now)
    others = [c for c in schedext["status"].get("conditions", ()) if c["type"] != "Ready"]
    status = {"observedGeneration": generation, "nodes": nodes, "conditions": [*others, ready]}
    if failures:
        status["failures"] = failures[:MAX_FAILURES]
    return status


def build_failure(pod: Pod, rivals: dict[str, str]) -> dict:
    reason, message = pod.reason, pod.message
    if reason == "CrashLoopBackOff" and pod.node in rivals:
        reason = "AlreadyAttached"
        message = (
            f"the scheduler of SchedExt {rivals[pod.node]} runs here, "
            f"and a kernel attaches one at a time; {message}"
        )
    return {"node": pod.node, "pod": pod.name, "reason": reason, "message": message[:1000]}


def count_nodes(view: View, failing: int) -> dict:
    seen = view.daemonset["status"]
    desired = seen.get("desiredNumberScheduled", 0)
    updated = seen.get("updatedNumberScheduled", 0)
    if has_on_delete(view.daemonset) and not has_on_delete(view.schedext):  # it is parked
        updated = min(desired, len(current_of(view.pods, view.daemonset)))
    return {
        "desired": desired,
        "ready": sum(pod.since <= view.settled_before for pod in view.pods),
        "updated": updated,
        "failing": desired if view.podless_seconds >= SETTLE_SECONDS else failing,
    }


def ready_reason(view: View, nodes: dict, failures: list[dict]) -> tuple[str, str]:
    """Reason and message of the Ready condition where the DaemonSet is as it should be."""
    schedext, daemonset, desired = view.schedext, view.daemonset, nodes["desired"]
    namespace, name = key_of(schedext)
    if not is_observed(daemonset):
        return "RollingOut", "waiting for the DaemonSet controller"
    if schedext["spec"].get("suspend"):
        return "Suspended", "it runs on no node; set spec.suspend to false to resume"
    if not desired:
        pairs = ",".join("=".join(pair) for pair in sorted(selector_of(schedext)))
        command = f"kubectl get nodes -l {pairs}" if pairs else "kubectl get nodes"
        return "NoNodes", f"no node is there for it: check labels and taints with '{command}'"
    if failures:
        first = failures[0]
        return "NodesFailing", (
            f"failing on {nodes['failing']} of {desired} nodes; "
            f"{first['node']}: {first['reason']}: {first['message']}"
        )
    if view.podless_seconds >= SETTLE_SECONDS:
        return "NodesFailing", (
            f"{desired} nodes want a pod and none exists: the namespace must allow privileged "
            f"pods: 'kubectl label --overwrite namespace {namespace} "
            "pod-security.kubernetes.io/enforce=privileged'; if it does, see "
            f"'kubectl describe daemonset -n {namespace} {name}'"
        )
    settled = [pod for pod in view.pods if pod.since <= view.settled_before]
    if nodes["updated"] >= desired and len(current_of(settled, daemonset)) >= desired:
        return "AllReady", f"running on {desired} of {desired} nodes"
    message = f"ready on {nodes['ready']} of {desired} nodes, updated on {nodes['updated']}"
    if any(view.settled_before < pod.since < math.inf for pod in view.pods):
        message += f"; waiting to see them stay up for {settle_seconds(schedext):.0f} s"
    elif has_on_delete(schedext) and nodes["updated"] < desired:
        command = f"kubectl delete pod -n {namespace} -l name={name}"
        message += f"; updateStrategy is OnDelete: delete the old pods with '{command}'"
    return "RollingOut", message


# ---------------------------------------------------------------- leader election

LEASE_NAME = "b4c95cb3.schedkit.io"  # the Go operator's, so that the two never act at once
LEASE_SECONDS = 15
RENEW_SECONDS = 2.0
RENEW_DEADLINE_SECONDS = 10.0  # a leader that has not renewed for so long stops


class Elector:
    """Holds the Lease. Another's has expired when it has not changed for its duration."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.path = path_to(LEASES, namespace, LEASE_NAME)
        self.identity = f"{socket.gethostname()}_{uuid.uuid4()}"
        self.new_lease = {"metadata": {"name": LEASE_NAME, "namespace": namespace}}
        self.lease = self.new_lease  # as seen last
        self.seen = -math.inf  # when the lease was seen to change
        self.renewed = -math.inf  # when we asked for what we hold
        self.has_led = False

    def leads(self) -> bool:
        return time.monotonic() < self.renewed + RENEW_DEADLINE_SECONDS

    def check(self) -> None:
        """Before each write: a leader that was held up for too long must not write any more."""
        if self.has_led and not self.leads():
            log.critical("the lease was not renewed in time: another one may lead now")
            os._exit(1)

    def run(self, operator: Operator) -> None:
        """Take the lease when it is free, and renew it until the operator stops."""
        log.info("waiting for the lease as %s", self.identity)
        while not operator.stop.is_set():
            operator.beat()
            try:
                self.take()
                operator.report("lease", "")
            except ApiError as error:
                if error.status != 409:  # another one was faster
                    operator.report("lease", str(error))
            self.check()
            operator.stop.wait(RENEW_SECONDS)

    def take(self) -> None:
        """Take or renew the lease if it is free or ours."""
        asked = time.monotonic()
        lease = self.api.get(self.path, timeout=RENEW_SECONDS) or self.new_lease
        if lease != self.lease:
            self.lease = lease
            self.seen = time.monotonic()
        spec, now = lease.get("spec") or {}, timestamp("microseconds")
        holder = spec.get("holderIdentity")
        if holder != self.identity:
            self.renewed = -math.inf
            if holder and asked < self.seen + spec.get("leaseDurationSeconds", LEASE_SECONDS):
                return
            transitions = spec.get("leaseTransitions", -1) + 1
            spec = spec | {"acquireTime": now, "leaseTransitions": transitions}
        ours = {"holderIdentity": self.identity, "leaseDurationSeconds": LEASE_SECONDS}
        self.put(spec | ours | {"renewTime": now})
        self.renewed = asked
        self.has_led = True

    def put(self, spec: dict) -> None:
        """PUT also creates a Lease; its resourceVersion makes it a compare-and-swap."""
        body = self.lease | {"spec": spec}
        self.lease = self.api.request("PUT", self.path, body, timeout=RENEW_SECONDS)

    def release(self) -> None:
        """Let another one lead at once."""
        if self.leads():
            with contextlib.suppress(ApiError):
                self.put(self.lease["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1})


# ---------------------------------------------------------------- health and metrics

PASS = (("controller", "schedext"),)
RECONCILE_TIME = "controller_runtime_reconcile_time_seconds"
METRICS = {
    "controller_runtime_reconcile_total": "counter",
    RECONCILE_TIME: "histogram",
    "rest_client_requests_total": "counter",
    "workqueue_depth": "gauge",
    "leader_election_master_status": "gauge",
    "sked_schedext_nodes": "gauge",
    "sked_build_info": "gauge",
}
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, "+Inf")


class Metrics:
    """Samples by name and labels, of which none needs escaping."""

    def __init__(self) -> None:
        self.samples = defaultdict(float)  # by name and labels
        self.lock = threading.Lock()

    def add(self, name: str, amount: float = 1.0, **labels: Any) -> None:
        with self.lock:
            self.samples[name, tuple(labels.items())] += amount

    def reconciled(self, result: str, seconds: float) -> None:
        """Count a pass; its duration is in each bucket that is large enough."""
        with self.lock:
            self.samples["controller_runtime_reconcile_total", (*PASS, ("result", result))] += 1
            self.samples[f"{RECONCILE_TIME}_sum", PASS] += seconds
            self.samples[f"{RECONCILE_TIME}_count", PASS] += 1
            for bound in BUCKETS:
                fits = seconds <= float(bound)
                self.samples[f"{RECONCILE_TIME}_bucket", (*PASS, ("le", bound))] += fits

    def text(self, gauges: dict) -> str:
        """All of it, as Prometheus reads it."""
        with self.lock:
            samples = self.samples | gauges
        lines = []
        for metric, kind in METRICS.items():
            lines.append(f"# TYPE {metric} {kind}")
            for (name, labels), value in samples.items():
                if name.startswith(metric):
                    pairs = ",".join(f'{label}="{text}"' for label, text in labels)
                    lines.append(f"{name}{{{pairs}}} {float(value)}")
        return "\n".join(lines)


def gauges(operator: Operator, leads: bool) -> dict:
    """What is measured when somebody asks."""
    found = {
        ("workqueue_depth", (("name", "schedext"),)): operator.queue.depth(),
        ("leader_election_master_status", (("name", LEASE_NAME),)): leads,
        ("sked_build_info", (("version", __version__),)): 1,
    }
    for (namespace, name), schedext in operator.schedexts.items.copy().items():
        if schedext["spec"].get("suspend"):
            continue  # nobody wants to be woken because it runs nowhere
        for state, count in (schedext["status"].get("nodes") or {}).items():
            labels = (("namespace", namespace), ("name", name), ("state", state))
            found["sked_schedext_nodes", labels] = count
    return found


@functools.lru_cache(100)
def review(api: Api, authorization: str, moment: int) -> int:
    """200 if the API server lets the caller get /metrics, else the HTTP status of the refusal."""
    kind, _, token = authorization.partition(" ")
    if kind.lower() != "bearer" or not token:
        return 401
    path = "/apis/authentication.k8s.io/v1/tokenreviews"
    answer = api.request("POST", path, {"spec": {"token": token}}, timeout=5)["status"]
    if not answer.get("authenticated"):
        return 401
    user = answer["user"]
    spec = {field: user.get(field) for field in ("uid", "groups", "extra")}
    spec["user"] = user.get("username")
    spec["nonResourceAttributes"] = {"path": "/metrics", "verb": "get"}
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    answer = api.request("POST", path, {"spec": spec}, timeout=5)["status"]
    return 200 if answer.get("allowed") else 403


class Handler(http.server.BaseHTTPRequestHandler):
    """GET of the server's routes."""

    timeout = 5

    def do_GET(self) -> None:
        route = self.server.routes.get(self.path.partition("?")[0])
        status, text = route(self.headers) if route else (404, "not found")
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.end_headers()
        self.wfile.write(f"{text}\n".encode())

    def log_message(self, *_: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """Answers at an address in Go's form (':8081', '127.0.0.1:8081', '[::1]:8081')."""

    request_queue_size = 128

    def __init__(self, address: str, routes: dict, certificate: str | None = None) -> None:
        host, _, port = address.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{address!r} is no address such as :8081 or 127.0.0.1:8081")
        if socket.has_dualstack_ipv6() and (not host or ":" in host):
            self.address_family = socket.AF_INET6
        self.routes = routes
        self.certificate = certificate  # the directory of tls.crt and tls.key
        self.held = {}  # the connections, the oldest first
        try:
            super().__init__((host.strip("[]"), int(port)), Handler)
        except OSError as error:
            raise ValueError(f"cannot listen at {address}: {error.strerror}") from None
        spawn(self.serve_forever, address)

    def get_request(self) -> tuple:
        connection, address = super().get_request()
        if self.certificate:  # it may have been renewed; the handshake is for the handler's thread
            tls = server_tls(self.certificate)
            connection = tls.wrap_socket(connection, True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: socket.socket, client_address: Any) -> None:
        """Answer in a thread of its own; where there are too many, the oldest one has to go."""
        if len(self.held) >= MAX_CONNECTIONS:
            oldest = list(self.held)[0]
            self.held.pop(oldest, None)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        self.held[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self.held.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        log.debug("a connection failed", exc_info=True)


def server_tls(directory: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(f"{directory}/tls.crt", f"{directory}/tls.key")
    except OSError as error:
        raise OSError(
            f"no use can be made of tls.crt and tls.key in {directory}: {error}"
        ) from None
    return context


def self_signed() -> str:
    """A new directory with a certificate of our own making."""
    directory = tempfile.mkdtemp(prefix="sked-")
    atexit.register(shutil.rmtree, directory)
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 "
        f"-subj /CN=sked -keyout {directory}/tls.key -out {directory}/tls.crt"
    )
    try:
        subprocess.run(command.split(), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"give a certificate with --metrics-cert-dir ({error})") from None
    return directory


# ---------------------------------------------------------------- the command line


def load_configuration(path: str | None, context: str | None) -> Configuration:
    """The flag, else $KUBECONFIG, else from inside a cluster, else ~/.kube/config."""
    configuration = Configuration()
    path = path or os.environ.get("KUBECONFIG")
    if not path and not context and "KUBERNETES_SERVICE_HOST" in os.environ:
        kubeconfig.load_incluster_config(configuration)
        return configuration
    paths = map(os.path.expanduser, (path or "~/.kube/config").split(os.pathsep))
    files = [file for file in paths if os.path.exists(file)]
    if not files:
        where = path or "~/.kube/config"
        raise ValueError(f"no kubeconfig at {where}: name one with --kubeconfig or $KUBECONFIG")
    for file in files:  # the first one that names a context decides, as for kubectl
        with open(file) as stream:
            content = yaml.safe_load(stream) or {}
        if not isinstance(content, dict):
            raise ValueError(f"{file} is no kubeconfig")
        context = context or content.get("current-context")
    kubeconfig.load_kube_config(os.pathsep.join(files), context, configuration, False)
    return configuration


def render(stream: Any) -> str:
    """The DaemonSets of the SchedExts in a YAML stream, as YAML."""
    documents = [document for document in yaml.safe_load_all(stream) if isinstance(document, dict)]
    schedexts = [document for document in documents if document.get("kind") == "SchedExt"]
    if not schedexts:
        raise ValueError("there is no SchedExt in it")
    daemonsets = [build_daemonset(schedext, schedexts) for schedext in schedexts]
    return yaml.safe_dump_all(daemonsets, sort_keys=False)


def go_bool(text: str) -> bool:
    if text.lower() not in ("1", "t", "true", "0", "f", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("1", "t", "true")


def parse(argv: list[str]) -> argparse.Namespace:
    description = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser("sked", description=description, allow_abbrev=False)
    flag = parser.add_argument
    switch = {"nargs": "?", "const": True, "type": go_bool, "metavar": "BOOL"}
    levels = ("debug", "info", "warning", "error")
    flag("--kubeconfig", metavar="FILE", help="else $KUBECONFIG, the pod's own, ~/.kube/config")
    flag("--context", help="the context of the kubeconfig to use")
    flag("--namespace", default="", help="watch this namespace only")
    flag("--render", metavar="FILE", help="print the DaemonSets of a manifest ('-': stdin), exit")
    flag("--leader-elect", default=False, help="work only while holding the lease", **switch)
    flag(
        "--leader-election-namespace", metavar="NAMESPACE", help="of the lease; else the pod's own"
    )
    flag(
        "--health-probe-bind-address",
        default=":8081",
        metavar="ADDRESS",
        help="of /healthz and /readyz; 0: none (default: :8081)",
    )
    flag(
        "--metrics-bind-address",
        default="0",
        metavar="ADDRESS",
        help="of /metrics, such as :8443; 0: none (default)",
    )
    flag(
        "--metrics-secure",
        default=True,
        help="metrics by HTTPS, to those who may (default: true)",
        **switch,
    )
    flag(
        "--metrics-cert-dir",
        metavar="DIR",
        help="of the metrics' tls.crt and tls.key; else self-signed",
    )
    flag("--enable-http2", default=False, help="must be false", **switch)
    flag("--log-level", default="info", choices=levels, help="how much to say (default: info)")
    for name in ("devel", "encoder", "log-level", "stacktrace-level", "time-encoding"):
        flag(f"--zap-{name}", nargs="?", help=argparse.SUPPRESS)  # the Go operator's
    flag("--version", action="version", version=__version__)
    args = parser.parse_args(argv)
    if args.enable_http2:
        parser.error("--enable-http2=true: sked speaks HTTP/1.1 only")
    return args


def lease_namespace(flag: str | None) -> str:
    account = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
    if not flag and os.path.exists(account):
        with open(account) as file:
            return file.read().strip()
    if not flag:
        raise ValueError("--leader-elect needs --leader-election-namespace outside of a cluster")
    return flag


def serve(args: argparse.Namespace, operator: Operator, leads: Callable[[], bool]) -> None:
    """Start the HTTP servers that are asked for."""

    def healthz(headers: Any) -> tuple[int, str]:
        oldest = time.monotonic() - STUCK_SECONDS
        beats = operator.beats.copy().items()
        stuck = sorted(t.name for t, beat in beats if beat < oldest or not t.is_alive())
        return (503, f"no sign of life from {', '.join(stuck)}") if stuck else (200, "ok")

    def readyz(headers: Any) -> tuple[int, str]:
        if not leads():
            return 200, "standing by"
        return (200, "ok") if operator.ready() else (503, "the caches are not filled yet")

    def metrics(headers: Any) -> tuple[int, str]:
        status = 200
        if args.metrics_secure:
            moment = int(time.monotonic() // 10)  # so what is known of a caller expires
            try:
                status = review(operator.api, headers.get("Authorization", ""), moment)
            except ApiError as error:
                return 503, str(error)
        if status != 200:
            return status, http.HTTPStatus(status).phrase
        return 200, operator.api.metrics.text(gauges(operator, leads()))

    if args.health_probe_bind_address != "0":
        Server(args.health_probe_bind_address, {"/healthz": healthz, "/readyz": readyz})
    if args.metrics_bind_address != "0":
        certificate = None
        if args.metrics_secure:
            certificate = args.metrics_cert_dir or self_signed()
            server_tls(certificate)  # so that one that is no use shows at the start
        Server(args.metrics_bind_address, {"/metrics": metrics}, certificate)


def run(args: argparse.Namespace) -> None:
    """Wire it up, and work until a signal comes."""
    api = Api(lambda: load_configuration(args.kubeconfig, args.context))
    elector = None
    if args.leader_elect:
        elector = Elector(api, lease_namespace(args.leader_election_namespace))
    operator = Operator(api, args.namespace, elector.check if elector else lambda: None)
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # in all threads but the one that waits

    def stop_on_signal() -> None:
        signal.sigwait(signals)
        operator.stop.set()

    spawn(stop_on_signal, "signals")
    serve(args, operator, elector.leads if elector else lambda: True)
    gc.freeze()  # what is loaded by now stays; looking it through again is a tenth of the CPU
    where = args.namespace or "all namespaces"
    log.info("sked %s, for SchedExts in %s, at %s", __version__, where, api.host)
    if elector:
        renewal = spawn(functools.partial(elector.run, operator), "lease")
        while not elector.has_led and not operator.stop.wait(0.05):
            pass
        log.info("leading" if elector.has_led else "stopped while standing by")
    if operator.run() and elector:
        renewal.join(0.4)  # else its last answer could make ours a conflict
        elector.release()
    log.info("stopped")


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    style = "%(asctime)sZ %(levelname)-7s %(message)s"
    logging.basicConfig(level=args.log_level.upper(), format=style, datefmt="%Y-%m-%dT%H:%M:%S")
    logging.Formatter.converter = time.gmtime
    urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    try:
        if not args.render:
            run(args)
        else:
            with open(0 if args.render == "-" else args.render) as stream:
                print(render(stream), end="")
    except (OSError, ValueError, yaml.YAMLError, kubeconfig.ConfigException) as error:
        print("sked:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
