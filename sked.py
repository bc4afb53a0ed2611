"""Run sched_ext schedulers on Kubernetes nodes: one SchedExt in, one DaemonSet out.

    API server --watch--> Reflector --key--> WorkQueue -> worker -> reconcile
    reconcile: build_daemonset -> create or patch -> build_status -> patch the status, only where something differs

Throughout this file:
    schedext   a SchedExt, as the plain dict the API returns
    daemonset  a DaemonSet, likewise; in the cache without what the API server fills in by itself
    pod        the few facts that are kept of a scheduler's pod
    key        (namespace, name) of a SchedExt, and so of its DaemonSet: all that travels through the queue
    selector   the pairs of a nodeSelector, as a set; of two that nest, the larger wins the nodes that both select

reconcile looks at the caches and never asks which event woke it. sked deletes nothing: the owner reference does.
"""
from __future__ import annotations

import argparse, bisect, contextlib, datetime, hashlib, heapq, http.server, itertools, json, logging, math, os, queue, random, re
import signal, socket, ssl, subprocess, sys, tempfile, threading, time, urllib.parse, uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import urllib3
import yaml
from kubernetes import config as kubeconfig
from kubernetes.client import Configuration
from kubernetes.client.rest import RESTClientObject
from kubernetes.utils.keepalive import tcp_keepalive_socket_options
from kubernetes.utils.quantity import parse_quantity

__version__ = "1.0.0"

Key = tuple[str, str]
Selector = frozenset[tuple[str, str]]

SCHEDEXTS = "/apis/sked.schedkit.io/v1{}/schedexts"
DAEMONSETS = "/apis/apps/v1{}/daemonsets"
PODS, EVENTS = "/api/v1{}/pods", "/api/v1{}/events"
LEASES = "/apis/coordination.k8s.io/v1{}/leases"
LABEL, OURS = "managed-by", "sked-controller"  # on every DaemonSet and pod of sked's, and of the Go operator's

REQUEST_SECONDS = 30.0  # longer than the API server takes for anything but a watch
WATCH_SECONDS = 240  # the server ends a quiet watch, just before with a bookmark
PROBE_SECONDS = 10  # the first watch after a failure is short, to see whether the server still knows where we are
TOKEN_SECONDS = 10.0  # between two looks at the token, which a file or a plugin may renew
PAGE_ITEMS = 100  # of a list, so that no answer is large
WORKERS = 4  # they hide the API's latency; more would only compete for the interpreter
GATHER_SECONDS = 1.0  # changes of pods are gathered, and a status is written at most this often
SETTLE_SECONDS = 10.0  # a scheduler that cannot attach is Ready for 2 s at every try; one that stays up this long has attached
NAME_TAKEN_SECONDS = 60.0  # until the next look at a DaemonSet that is not watched because it is not ours
MAX_TERMS = 100  # of a node affinity
MAX_FAILURES = 10  # told in a status; the rest is in the count

log = logging.getLogger("sked")


def backoff(failures: int, most: float) -> float:
    """Seconds to wait after so many failures in a row: 1, 2, 4, ... with jitter, so that those who failed together do not return together."""
    return min(most, 2.0 ** min(failures - 1, 20)) * random.uniform(0.75, 1.0)


def timestamp(precision: str = "seconds") -> str:
    """Now, as the API writes it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec=precision).replace("+00:00", "Z")


def epoch(stamp: str) -> float:
    return datetime.datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


# ---------------------------------------------------------------- the API server


class ApiError(Exception):
    """The API server said no, or (status 0) nothing that can be understood."""

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Api:
    """Plain dicts over the kubernetes client's connections; all that can go wrong is an ApiError."""

    def __init__(self, configure: Callable[[], Configuration]) -> None:
        self.configure, self.metrics = configure, Metrics()
        self.connect()

    def connect(self) -> None:
        configuration = self.configure()
        configuration.retries = False  # else a GET takes four times its timeout
        configuration.connection_pool_maxsize = WORKERS + 8
        configuration.socket_options = tcp_keepalive_socket_options(idle=30, interval=10, count=3)
        # One TLS context for all connections: on its own, each would load all certificate authorities again.
        tls = urllib3.util.ssl_.create_urllib3_context(cert_reqs=ssl.CERT_REQUIRED if configuration.verify_ssl else ssl.CERT_NONE)
        if configuration.verify_ssl and not configuration.ssl_ca_cert:
            tls.load_default_certs()
        manager = RESTClientObject(configuration).pool_manager
        manager.connection_pool_kw["ssl_context"] = tls
        self.pool = manager.connection_from_url(configuration.host)  # asking the manager each time costs a quarter of a request
        self.configuration, self.host, self.token_due = configuration, configuration.host.rstrip("/"), 0.0

    def get(self, path: str, timeout: float = REQUEST_SECONDS) -> dict | None:
        """An object, or None where there is none."""
        try:
            return self.request("GET", path, timeout=timeout)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    def request(self, method: str, path: str, body: dict | None = None, timeout: float = REQUEST_SECONDS, **query: Any) -> dict:
        """The JSON that the API server answers."""
        with self.errors():
            return json.loads(self.open(method, path, body, urllib3.Timeout(total=timeout), query).data)

    def watch(self, path: str, seconds: int, **query: Any) -> Iterator[dict]:
        """The events of a watch, which the server ends after so many seconds."""
        query |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": seconds}
        with self.errors():
            response = self.open("GET", path, None, urllib3.Timeout(connect=10, read=seconds + REQUEST_SECONDS), query)

        def events() -> Iterator[dict]:
            with self.errors(), contextlib.closing(response):
                yield from map(json.loads, response)
        return events()

    def open(self, method: str, path: str, body: dict | None, timeout: urllib3.Timeout, query: dict) -> urllib3.BaseHTTPResponse:
        """The response, not yet read, to a request that succeeded."""
        if time.monotonic() >= self.token_due:
            token = self.configuration.auth_settings().get("BearerToken")
            self.token, self.token_due = {"Authorization": token["value"]} if token else {}, time.monotonic() + TOKEN_SECONDS
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json", "Content-Type": kind, "User-Agent": f"sked/{__version__}", **self.token}
        url = f"{urllib.parse.urlsplit(self.host).path}{path}{'?' * bool(query)}{urllib.parse.urlencode(query)}"
        data = None if body is None else json.dumps(body).encode()
        response = self.pool.urlopen(method, url, data, headers, retries=False, timeout=timeout, preload_content=False)
        if response.status < 300:
            return response
        if response.status == 401:
            self.connect()  # the token was rotated: read it again, whatever the clock says
        text, retry_after = response.data.decode(errors="replace"), response.headers.get("Retry-After", "")
        try:
            message = json.loads(text)["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{response.status} {response.reason} {text[:200]}".strip()
        raise ApiError(response.status, message, min(float(retry_after), 60.0) if retry_after.isdigit() else 0.0)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Every way in which a request fails, as an ApiError."""
        try:
            yield
        except ApiError as error:
            self.metrics.add("sked_api_errors_total", code=error.status)
            raise
        except (urllib3.exceptions.HTTPError, OSError, ValueError, yaml.YAMLError, kubeconfig.ConfigException) as error:
            self.metrics.add("sked_api_errors_total", code=0)
            words = str(error).rpartition(": ")[2].partition(" (read timeout")[0]  # whose seconds are never the same
            raise ApiError(0, f"no usable answer from the API server at {self.host}: {words}") from error


# ---------------------------------------------------------------- watching


class Reflector:
    """A cache of one resource that follows the API server; changed(old, new) is told of each difference."""

    def __init__(self, operator: Operator, name: str, path: str, keep: Callable, changed: Callable, groups: Callable, **query: Any) -> None:
        self.operator, self.api, self.name, self.path, self.query = operator, operator.api, name, path, query
        self.keep, self.changed, self.groups_of = keep, changed, groups
        self.items: dict[Key, Any] = {}
        self.versions: dict[Key, int] = {}
        self.groups: defaultdict[Any, dict[Key, Any]] = defaultdict(dict)
        self.lock, self.synced = threading.Lock(), threading.Event()
        self.version, self.failures = "", 0  # seen last (empty: list first), and how often nothing came from there

    def select(self, group: Any) -> list:
        """The items of a group."""
        with self.lock:
            return list(self.groups[group].values()) if group in self.groups else []

    def store(self, obj: dict) -> Any:
        """What is kept of the answer to a write: the next look finds it, and its echo in the watch, no newer, wakes nobody."""
        return self.put(key_of(obj), int(obj["metadata"]["resourceVersion"]), obj, tell=False)

    def put(self, key: Key, version: int, obj: dict | None, live: bool = True, tell: bool = True) -> Any:
        """Keep what is needed of obj, or nothing if it is None. What comes live, not in a list, may be older than what is there,
        and the answer to a write older than what the watch has seen: it may be gone already."""
        with self.lock:
            old = self.items.get(key)
            if live and version <= self.versions.get(key, -1 if tell else int(self.version or 0)):
                return old or obj and self.keep(obj, None, live)
            new = self.keep(obj, old, live) if obj else None
            for group in self.groups_of(old) if old else ():
                del self.groups[group][key]
                if not self.groups[group]:
                    del self.groups[group]
            if new:
                self.items[key], self.versions[key] = new, version
                for group in self.groups_of(new):
                    self.groups[group][key] = new
            elif old:
                del self.items[key], self.versions[key]
        if tell and old != new:
            self.changed(old, new)
        return new

    def run(self) -> None:
        while not self.operator.stop.is_set():
            started = time.monotonic()
            try:
                self.list_and_watch()
                pause = 0.0 if time.monotonic() - started > 1 else 1.0  # some proxies end each watch at once
            except Exception as error:
                pause = max(self.fail(error), getattr(error, "retry_after", 0.0))
            self.operator.health.beat(self.name, pause + REQUEST_SECONDS)
            self.operator.stop.wait(pause)

    def list_and_watch(self) -> None:
        if not self.version:
            self.list()
        self.operator.health.beat(self.name, WATCH_SECONDS + 2 * REQUEST_SECONDS)
        events = self.api.watch(self.path, PROBE_SECONDS if self.failures else WATCH_SECONDS, resourceVersion=self.version, **self.query)
        self.operator.report(self.name, None)
        event = None
        for event in events:
            if self.operator.stop.is_set():
                return
            self.handle(event["type"], event["object"])
        if not event:  # not even a bookmark: to a version from before a restore from backup the server just stays silent
            self.version = ""

    def handle(self, kind: str, obj: dict) -> None:
        """One event of a watch."""
        if kind == "ERROR":
            raise ApiError(obj.get("code", 0), obj.get("message", "the watch failed"))
        self.version, self.failures = obj["metadata"]["resourceVersion"], 0
        if kind != "BOOKMARK":
            self.put(key_of(obj), int(self.version), None if kind == "DELETED" else obj)

    def list(self) -> None:
        seen, query = set(), self.query | {"limit": PAGE_ITEMS}
        while query.get("continue") != "":
            self.operator.health.beat(self.name, 2 * REQUEST_SECONDS)
            page = self.api.request("GET", self.path, **query)
            for obj in page.get("items") or ():
                seen.add(key_of(obj))
                self.put(key_of(obj), int(obj["metadata"]["resourceVersion"]), obj, live=False)
            query["continue"] = page["metadata"].get("continue", "")
        self.version = page["metadata"]["resourceVersion"]
        self.sweep(seen)
        self.synced.set()

    def sweep(self, seen: set[Key]) -> None:
        """What vanished between two lists counts as deleted."""
        for key in set(self.items) - seen:
            self.put(key, 0, None, live=False)

    def fail(self, error: Exception) -> float:
        """Seconds to wait; and list again where the version is gone, or nothing comes from it again and again."""
        self.failures += 1
        self.api.metrics.add("sked_watch_restarts_total", resource=self.name)
        status = getattr(error, "status", 410)
        if status == 410 or self.failures % 3 == 0:
            self.version = ""
        if not isinstance(error, ApiError):
            log.log(logging.ERROR if self.failures == 1 else logging.DEBUG, "%s: bug in the watch loop", self.name, exc_info=error)
        elif status == 404 and self.name == "schedexts":
            self.sweep(set())  # with the CRD go all SchedExts
            self.operator.report(self.name, "SchedExts are unknown to the API server: install the CRD with 'kubectl apply -f install.yaml'")
        elif status != 410 and (self.failures > 1 or not self.synced.is_set()):  # to lose a watch once is nothing
            self.operator.report(self.name, str(error))
        return backoff(self.failures, 30)


def key_of(obj: dict) -> Key:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


# ---------------------------------------------------------------- the queue


class WorkQueue:
    """Keys to work on: each waits at most once, goes to one worker when it is due, and never to two at a time."""

    def __init__(self) -> None:
        self.due: dict[Key, float] = {}
        self.heap: list[tuple[float, Key]] = []  # may still hold what is not due then any more
        self.busy: set[Key] = set()
        self.failures: dict[Key, int] = {}
        self.changed, self.closed = threading.Condition(), False

    def add(self, key: Key, after: float = 0.0) -> None:
        """Work on key in so many seconds, or sooner if it is due sooner."""
        with self.changed:
            when = time.monotonic() + after
            if when < self.due.get(key, math.inf):
                self.due[key] = when
                self.push(key)

    def push(self, key: Key) -> None:
        if key in self.due and key not in self.busy:
            heapq.heappush(self.heap, (self.due[key], key))
            self.changed.notify()

    def get(self, timeout: float) -> tuple[Key, float] | None:
        """A key that is due and for how long it has been, or None after the timeout."""
        give_up = time.monotonic() + timeout
        with self.changed:
            while not self.closed:
                while self.heap and self.due.get(self.heap[0][1]) != self.heap[0][0]:
                    heapq.heappop(self.heap)
                now, (when, key) = time.monotonic(), self.heap[0] if self.heap else (math.inf, None)
                if when <= now:
                    heapq.heappop(self.heap)
                    del self.due[key]
                    self.busy.add(key)
                    return key, now - when
                if now >= give_up:
                    break
                self.changed.wait(min(when, give_up) - now)
        return None

    def done(self, key: Key) -> None:
        with self.changed:
            self.busy.remove(key)
            self.push(key)

    def retry(self, key: Key, at_least: float) -> int:
        """Work on a key that failed again, later each time; how often it has failed."""
        self.failures[key] = self.failures.get(key, 0) + 1
        self.add(key, max(at_least, backoff(self.failures[key], 300)))
        return self.failures[key]

    def close(self) -> None:
        """Hand out no more keys."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


# ---------------------------------------------------------------- reconcile


class Blocked(Exception):
    """Why the DaemonSet cannot be as it should: reason and message for the status, and seconds until the next look (None: back off)."""

    def __init__(self, reason: str, message: str, look_again: float | None) -> None:
        super().__init__(message)
        self.reason, self.look_again = reason, look_again


class Memory:
    """What is remembered of a SchedExt; a restart may forget it."""

    wrote = -math.inf  # when something was written for it last
    told = ""  # reason of the event sent last
    overruled: tuple | None = None  # a patch that changed nothing, and the generation it met
    wanting = -math.inf  # since when it wants pods and has none: infinite while that is not so, and at first what the status says


class Operator:
    """The caches, the queue, and the work on one key."""

    def __init__(self, api: Api, namespace: str = "", before_write: Callable[[], None] = lambda: None) -> None:
        self.api, self.metrics, self.before_write = api, api.metrics, before_write
        self.stop, self.health, self.queue = threading.Event(), Health(), WorkQueue()
        self.events: queue.Queue[dict] = queue.Queue(1000)
        self.memory: defaultdict[Key, Memory] = defaultdict(Memory)
        self.faults, self.lock = {}, threading.Lock()
        scope, ours = f"/namespaces/{namespace}" if namespace else "", f"{LABEL}={OURS}"
        watched = lambda name, path, *how, **query: Reflector(self, name, path.format(scope), *how, **query)
        self.schedexts = watched("schedexts", SCHEDEXTS, keep_schedext, self.schedext_changed, lambda s: (selector_of(s),))
        self.daemonsets = watched("daemonsets", DAEMONSETS, keep_daemonset, self.daemonset_changed, lambda d: (), labelSelector=ours)
        self.pods = watched("pods", PODS, keep_pod, self.pod_changed, lambda p: (p.owner, p.node), labelSelector=ours)
        self.reflectors = self.schedexts, self.daemonsets, self.pods

    def run(self) -> bool:
        """Work until stop is set; whether all work has ended then."""
        for reflector in self.reflectors:
            self.health.spawn(reflector.name, reflector.run)
        while not self.ready() and not self.stop.wait(0.01):
            pass
        workers = [self.health.spawn(name, self.work, name) for name in (f"worker-{n}" for n in range(WORKERS))]
        self.health.spawn("events", self.send_events)
        self.stop.wait()
        self.queue.close()
        for worker in workers:
            worker.join(0.8 / WORKERS)
        return not any(worker.is_alive() for worker in workers)

    def ready(self) -> bool:
        return all(reflector.synced.is_set() for reflector in self.reflectors)

    def report(self, who: str, fault: str | None) -> None:
        """Log a fault of a watch if it is news, and that all is well again."""
        with self.lock:
            known = self.faults.pop(who, None)
            if fault and fault != known and fault not in self.faults.values():
                log.warning("%s; trying again", fault)
            if fault:
                self.faults[who] = fault
            elif known and not self.faults:
                log.info("the API server answers again")

    # Whom a change concerns.

    def schedext_changed(self, old: dict | None, new: dict | None) -> None:
        self.queue.add(key_of(new or old))
        selectors = {selector_of(schedext) for schedext in (old, new) if schedext}
        if not (old and new) or len(selectors) > 1:  # those that yield to it have to know
            for loser in self.selectors():
                if any(loser < selector for selector in selectors):
                    for schedext in self.schedexts.select(loser):
                        self.queue.add(key_of(schedext), GATHER_SECONDS)  # pools often come together, and each change restarts pods

    def selectors(self) -> list[Selector]:
        with self.schedexts.lock:
            return list(self.schedexts.groups)

    def daemonset_changed(self, old: dict | None, new: dict | None) -> None:
        """Drift is undone at once. One that is gone may have gone with its SchedExt: word of that may still be under way."""
        ours = lambda d: (d["spec"], d["metadata"]["labels"], d["metadata"]["ownerReferences"])
        drift = new and not (old and ours(old) == ours(new))
        self.queue.add(key_of(new or old), 0.0 if drift else GATHER_SECONDS)

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """A pod matters to its own SchedExt and to those that try to attach on the same node."""
        for pod in filter(None, (old, new)):
            for owner in {pod.owner, *(other.owner for other in self.pods.select(pod.node))}:
                self.queue.add(owner, GATHER_SECONDS)

    # The workers.

    def work(self, name: str) -> None:
        while not self.stop.is_set():
            self.health.beat(name, 6 * REQUEST_SECONDS)
            if item := self.queue.get(timeout=REQUEST_SECONDS):
                self.process(*item)

    def process(self, key: Key, waited: float) -> None:
        """Reconcile, and see to it that the key comes again where it must: the only place where errors end."""
        started, result = time.monotonic(), "success"
        try:
            look_again = self.reconcile(key)
            self.queue.failures.pop(key, None)
            if look_again < math.inf:
                self.queue.add(key, look_again)
        except Exception as error:
            result = "error"
            self.metrics.add("workqueue_retries_total", name="schedext")
            failures = self.queue.retry(key, getattr(error, "retry_after", 0.0))
            if isinstance(error, ApiError):
                log.log(logging.WARNING if failures == 1 else logging.DEBUG, "%s/%s: %s; trying again", *key, error)
            elif not isinstance(error, Blocked):  # of which the status tells
                log.exception("%s/%s: bug", *key)
        self.queue.done(key)
        self.metrics.add("controller_runtime_reconcile_total", controller="schedext", result=result)
        self.metrics.observe("controller_runtime_reconcile_time_seconds", time.monotonic() - started, controller="schedext")
        self.metrics.observe("workqueue_queue_duration_seconds", waited, name="schedext")

    def reconcile(self, key: Key) -> float:
        """Make the DaemonSet and the status of one SchedExt what they should be; seconds until another look is due."""
        schedext, blocked = self.schedexts.items.get(key), None
        if not schedext or "deletionTimestamp" in schedext["metadata"]:
            self.memory.pop(key, None)
            return math.inf
        try:
            daemonset = self.apply(key, schedext)
        except Blocked as error:
            blocked, daemonset = error, self.daemonsets.items.get(key)
        if daemonset and not controls(schedext, daemonset):
            daemonset = None
        clock, pods, memory = time.monotonic(), self.pods.select(key) if daemonset else [], self.memory[key]
        if pods or not daemonset or not daemonset["status"]["desiredNumberScheduled"]:
            memory.wanting = math.inf
        elif memory.wanting == math.inf or memory.wanting == -math.inf and ready_condition(schedext).get("reason") != "NodesFailing":
            memory.wanting = clock
        refused = clock - memory.wanting >= SETTLE_SECONDS
        pods = [pod for pod in pods if not pod.leaving]
        status = build_status(schedext, daemonset, pods, self.rivals(key, pods, clock), refused, blocked, timestamp(), clock)
        waits = [self.write_status(key, schedext, status), *(max(pod.settles_at - clock, GATHER_SECONDS) for pod in pods if pod.settles_at > clock)]
        if blocked and blocked.look_again is None:
            raise blocked
        if blocked:
            waits.append(blocked.look_again)
        if memory.wanting < math.inf and not refused:
            waits.append(memory.wanting + SETTLE_SECONDS - clock)
        return min(waits)

    def rivals(self, key: Key, pods: list[Pod], clock: float) -> dict[str, str]:
        """Nodes where a scheduler of this SchedExt fails and that of another SchedExt runs, and which one."""
        return {pod.node: "/".join(other.owner) for pod in pods if pod.fails(clock)
                for other in self.pods.select(pod.node) if other.owner != key and other.started and not other.fails(clock)}

    # Create or patch.

    def apply(self, key: Key, schedext: dict) -> dict:
        """The DaemonSet, made as it should be; Blocked where that cannot be."""
        path, mine = DAEMONSETS.format(f"/namespaces/{key[0]}"), selector_of(schedext)
        look = lambda: (found := self.api.get(f"{path}/{key[1]}")) and keep_daemonset(found)  # at one that lacks our label, so is not in the cache
        try:
            want = build_daemonset(schedext, [winner for s in self.selectors() if s > mine for winner in self.schedexts.select(s)[:1]])
            have = self.daemonsets.items.get(key)
            if not have and ready_condition(schedext).get("reason") == "NameTaken":
                have = look()
            if not have:
                try:
                    have = self.daemonsets.store(self.write("POST", path, want))
                    self.tell(key, schedext, "Normal", "Created", f"created DaemonSet {key[1]}")
                    return have
                except ApiError as error:
                    if error.status != 409 or not (have := look()):
                        raise
            check_control(schedext, have)
            return self.patch(key, schedext, have, want, f"{path}/{key[1]}")
        except ValueError as error:
            raise Blocked("Rejected", str(error), math.inf) from None
        except ApiError as error:
            if error.status not in (400, 403, 422):
                raise
            raise Blocked("Rejected", f"the API server refused the DaemonSet: {str(error)[:1000]}", None) from None

    def patch(self, key: Key, schedext: dict, have: dict, want: dict, path: str) -> dict:
        """The DaemonSet, patched where it differs from what is wanted."""
        patch, memory = daemonset_patch(have, want), self.memory[key]
        if not patch or memory.overruled == (patch, have["metadata"]["generation"]):
            return have
        what = ", ".join(patch.get("spec") or patch["metadata"])
        lock = {"uid": have["metadata"]["uid"]}  # never another one that took its name
        if not controls(schedext, have):
            lock["resourceVersion"] = have["metadata"]["resourceVersion"]  # nor one that somebody else adopts at this moment
        have = self.daemonsets.store(self.write("PATCH", path, patch | {"metadata": patch.get("metadata", {}) | lock}))
        self.tell(key, schedext, "Normal", "Patched", f"patched DaemonSet {key[1]}: {what}")
        if remains := daemonset_patch(have, want):
            memory.overruled = remains, have["metadata"]["generation"]
            log.warning("%s/%s: an admission webhook or the like overrules sked on the DaemonSet: %s", *key, json.dumps(remains))
        return have

    # The status and the events.

    def write_status(self, key: Key, schedext: dict, status: dict) -> float:
        """Patch the status where it differs; if that is too early, seconds until it may be."""
        before, memory, ready = schedext["status"], self.memory[key], status["conditions"][-1]
        hold = 5 * GATHER_SECONDS if ready["message"] == NOT_LOOKED else GATHER_SECONDS  # more can be said soon
        early = memory.wrote + hold - time.monotonic()
        if status == before or early > 0:
            return math.inf if status == before else early
        patch = {"metadata": {"resourceVersion": schedext["metadata"]["resourceVersion"]}, "status": dict.fromkeys(before) | status}
        try:
            self.schedexts.store(self.write("PATCH", f"{SCHEDEXTS.format(f'/namespaces/{key[0]}')}/{key[1]}/status", patch))
        except ApiError as error:
            if error.status not in (404, 409):  # it went or changed: the watch brings word of it
                raise
            return math.inf
        memory.wrote = time.monotonic()
        if ready["status"] == "True":
            memory.told = ""  # the next failure is news
        if ready["reason"] != ready_condition(schedext).get("reason"):
            self.tell(key, schedext, "Warning" if ready["reason"] in ("NodesFailing", "NameTaken", "Rejected") else "", ready["reason"], ready["message"])
        return math.inf

    def tell(self, key: Key, schedext: dict, kind: str, reason: str, message: str) -> None:
        """Log what happened, and hand an event (if it is of a kind) to its sender unless it only repeats the one before."""
        log.log(logging.WARNING if kind == "Warning" else logging.INFO, "%s/%s: %s: %s", *key, reason, message)
        memory = self.memory[key]
        if kind == "Normal":
            memory.wrote = time.monotonic()  # the status can wait for what comes of it
        if kind and memory.told != reason:
            memory.told = reason
            with contextlib.suppress(queue.Full):
                self.events.put_nowait(build_event(schedext, kind, reason, message, timestamp()))

    def send_events(self) -> None:
        """Events are a courtesy: they delay nothing, and one that cannot be sent is dropped."""
        while not self.stop.is_set():
            self.health.beat("events", 3 * REQUEST_SECONDS)
            with contextlib.suppress(queue.Empty, ApiError):
                event = self.events.get(timeout=REQUEST_SECONDS)
                self.write("POST", EVENTS.format(f"/namespaces/{event['metadata']['namespace']}"), event)

    def write(self, method: str, path: str, body: dict) -> dict:
        self.before_write()
        answer = self.api.request(method, path, body, fieldValidation="Ignore")  # else it is decoded twice, for warnings that nobody reads
        self.metrics.add("sked_api_writes_total", verb="patch" if method == "PATCH" else "create", kind=answer.get("kind"))
        return answer


def build_event(schedext: dict, kind: str, reason: str, message: str, now: str) -> dict:
    meta = schedext["metadata"]
    about = {"apiVersion": "sked.schedkit.io/v1", "kind": "SchedExt", "namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]}
    return {"apiVersion": "v1", "kind": "Event", "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
            "involvedObject": about, "type": kind, "reason": reason, "message": message[:1024], "count": 1,
            "source": {"component": "sked"}, "firstTimestamp": now, "lastTimestamp": now}


def controller_of(daemonset: dict) -> dict:
    return next((owner for owner in daemonset["metadata"]["ownerReferences"] if owner.get("controller")), {})


def controls(schedext: dict, daemonset: dict) -> bool:
    return controller_of(daemonset).get("uid") == schedext["metadata"]["uid"]


def check_control(schedext: dict, daemonset: dict) -> None:
    """Raise Blocked where the DaemonSet is not for this SchedExt to change: it is on its way out, or somebody else's."""
    (namespace, name), meta, owner, ours = key_of(schedext), daemonset["metadata"], controller_of(daemonset), controls(schedext, daemonset)
    if "deletionTimestamp" in meta or not ours and (owner.get("kind"), owner.get("name")) == ("SchedExt", name):
        raise Blocked("RollingOut", f"waiting until the old DaemonSet {name} is gone", SETTLE_SECONDS)
    stranger = meta["labels"].get(LABEL) != OURS or daemonset["spec"]["selector"] != {"matchLabels": {"name": name}}  # which cannot be changed
    if not ours and (owner or stranger):
        whose = f"belongs to {owner['kind']} {owner['name']}" if owner else "is not sked's"
        raise Blocked("NameTaken", f"a DaemonSet {name} exists and {whose}: give this SchedExt another name, or remove that DaemonSet "
                      f"with 'kubectl delete daemonset -n {namespace} {name}'", NAME_TAKEN_SECONDS)


# ---------------------------------------------------------------- build_daemonset

POD_FIELDS = ("nodeSelector", "tolerations", "priorityClassName", "imagePullSecrets", "hostPID")
CONTAINER_FIELDS = ("imagePullPolicy", "args", "env", "resources", "terminationMessagePolicy")
DAEMONSET_FIELDS = ("updateStrategy", "minReadySeconds")
LABELS = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9._-]{1,63}=[A-Za-z0-9._-]{0,63}")


def build_daemonset(schedext: dict, yields_to: Iterable[dict] = ()) -> dict:
    """The DaemonSet of a SchedExt, off the nodes of those SchedExts in yields_to that have a more specific nodeSelector.
    ValueError where the spec makes no DaemonSet."""
    meta, spec = schedext["metadata"], schedext.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("sched"), str) or not spec["sched"].strip():
        raise ValueError("spec.sched is missing: it names the image of a scheduler, such as ghcr.io/schedkit/scheds/scx_rusty:latest")
    paths = spec.get("hostPaths") or []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError("spec.hostPaths must be a list of absolute paths")
    given = lambda fields: {field: spec[field] for field in fields if spec.get(field) is not None}
    some = lambda **fields: {field: value for field, value in fields.items() if value}
    owner = {"apiVersion": "sked.schedkit.io/v1", "kind": "SchedExt", "name": meta["name"], "uid": meta.get("uid"),
             "controller": True, "blockOwnerDeletion": True}
    return {
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {
            "name": meta["name"], **some(namespace=meta.get("namespace")),
            "labels": {LABEL: OURS},
            **some(ownerReferences=[owner] if meta.get("uid") else None),
        },
        "spec": {
            "selector": {"matchLabels": {"name": meta["name"]}},
            **given(DAEMONSET_FIELDS),
            "template": {
                "metadata": {"labels": {"name": meta["name"], LABEL: OURS}},
                "spec": {
                    "containers": [{
                        "name": "scx",
                        "image": spec["sched"],
                        **given(CONTAINER_FIELDS),
                        "securityContext": {"privileged": True},
                        **some(volumeMounts=[{"name": f"host-{n}", "mountPath": path} for n, path in enumerate(paths)]),
                    }],
                    **given(POD_FIELDS),
                    **some(volumes=[{"name": f"host-{n}", "hostPath": {"path": path}} for n, path in enumerate(paths)],
                           affinity=node_affinity(selector_of(schedext), map(selector_of, yields_to))),
                },
            },
        },
    }


def selector_of(schedext: dict) -> Selector:
    """The pairs of the nodeSelector; none where one is not that of a label, for the API server will refuse it."""
    pairs = schedext["spec"].get("nodeSelector") if isinstance(schedext.get("spec"), dict) else None
    labels = isinstance(pairs, dict) and all(isinstance(value, str) and LABELS.fullmatch(f"{key}={value}") for key, value in pairs.items())
    return frozenset(pairs.items()) if labels else frozenset()


def node_affinity(mine: Selector, others: Iterable[Selector]) -> dict | None:
    """What keeps off the nodes of the others that are more specific. A node is not another's if it lacks one or another of
    its extra pairs: so there is a term for each way to choose a pair from every other."""
    winners = {other for other in others if other > mine}
    terms: set[Selector] = {frozenset()}
    for winner in winners:
        if not any(wider < winner for wider in winners):  # else its nodes go with the wider one's
            terms = {term | {pair} for term in terms for pair in winner - mine}
        if len(terms) > MAX_TERMS:
            raise ValueError(f"too many node pools: to yield to the SchedExts with a more specific nodeSelector takes more than {MAX_TERMS} "
                             "affinity terms, so the DaemonSet stays as it is: tell the pools apart by the values of one label")
    by_key = lambda term: itertools.groupby(sorted(term), key=lambda pair: pair[0])
    expressions = sorted([(key, [value for _, value in pairs]) for key, pairs in by_key(term)] for term in terms)
    return winners and {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": key, "operator": "NotIn", "values": values} for key, values in term]} for term in expressions]}}}


# ---------------------------------------------------------------- create or patch

# What the API server fills in where a DaemonSet is silent.
DEFAULTS = {
    "revisionHistoryLimit": 10, "minReadySeconds": 0, "hostPID": False, "type": "RollingUpdate", "maxUnavailable": 1, "maxSurge": 0,
    "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler",
    "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File", "apiVersion": "v1", "divisor": 0,
}
MAPS = ("nodeSelector", "labels", "matchLabels")  # their keys are the user's


def normal(value: Any, key: str = "") -> Any:
    """A part of a DaemonSet's spec without what the API server fills in: equal for two that mean the same."""
    if isinstance(value, list):
        return [normal(item, key) for item in value]
    if isinstance(value, dict) and key in ("limits", "requests"):
        return {name: quantity(amount) for name, amount in value.items()}
    if not isinstance(value, dict) or key in MAPS:
        return quantity(value) if key == "divisor" else value
    fields = {name: normal(field, name) for name, field in value.items()}
    if isinstance(image := fields.get("image"), str) and fields.get("imagePullPolicy") == default_pull_policy(image):
        del fields["imagePullPolicy"]
    return {name: field for name, field in fields.items()
            if field not in (None, "", [], {}) and (name not in DEFAULTS or DEFAULTS[name] != field)}


def quantity(amount: Any) -> Any:
    """The thousandths that a quantity means, for the API server makes 500m of 0.5, and rounds up; what is no quantity as it is."""
    try:
        return math.ceil(1000 * parse_quantity(str(amount)))
    except (ValueError, ArithmeticError):
        return amount


def default_pull_policy(image: str) -> str:
    name, digest, _ = image.rpartition("/")[2].partition("@")
    tag = name.partition(":")[2]
    return "Always" if tag == "latest" or not tag and not digest else "IfNotPresent"


def merge_patch(have: dict, want: dict) -> dict:
    """The JSON merge patch that turns have, which is normal, into want; empty where they mean the same."""
    patch: dict = {}
    for key in sorted(have.keys() | want.keys()):
        mine, theirs = want.get(key), have.get(key)
        if normal({key: mine}).get(key) == theirs:
            continue
        if isinstance(mine, dict) and isinstance(theirs, dict):
            patch[key] = dict.fromkeys(theirs) | mine if key in MAPS else merge_patch(theirs, mine)
        else:
            patch[key] = mine  # None removes it
    return patch


def daemonset_patch(have: dict, want: dict) -> dict:
    """What to send so that the DaemonSet is as wanted, empty if it is. Other labels, and annotations, are not ours."""
    owners = want["metadata"]["ownerReferences"]
    metadata = {"labels": {LABEL: OURS}} if have["metadata"]["labels"].get(LABEL) != OURS else {}
    metadata |= {"ownerReferences": owners} if have["metadata"]["ownerReferences"] != owners else {}
    spec = merge_patch(have["spec"], want["spec"])
    return ({"metadata": metadata} if metadata else {}) | ({"spec": spec} if spec else {})


def lean(value: Any) -> Any:
    """The same, its strings shared with all others in the caches: that halves them."""
    if isinstance(value, dict):
        return {sys.intern(key): lean(field) for key, field in value.items()}
    if isinstance(value, list):
        return [lean(item) for item in value]
    return sys.intern(value) if isinstance(value, str) else value


def identity(meta: dict) -> dict:
    return {field: meta[field] for field in ("namespace", "name", "uid", "resourceVersion", "generation", "deletionTimestamp") if field in meta}


def keep_schedext(obj: dict, *_: Any) -> dict:
    status = obj.get("status")
    return lean({"metadata": identity(obj["metadata"]), "spec": obj.get("spec"), "status": status if isinstance(status, dict) else {}})


def keep_daemonset(obj: dict, *_: Any) -> dict:
    """The parts that sked sets, in normal form, and what it asks of the rest."""
    meta, spec, status = obj["metadata"], obj["spec"], obj.get("status") or {}
    template = {"metadata": {"labels": spec["template"]["metadata"].get("labels")}, "spec": spec["template"]["spec"]}
    return lean({
        "metadata": identity(meta) | {"labels": meta.get("labels") or {}, "ownerReferences": meta.get("ownerReferences") or []},
        "spec": normal(spec | {"template": template}),
        "status": {field: status.get(field, 0) for field in ("observedGeneration", "desiredNumberScheduled", "updatedNumberScheduled")},
        "revision": (meta.get("annotations") or {}).get("deprecated.daemonset.template.generation"),
    })


# ---------------------------------------------------------------- build_status


NOT_LOOKED = "waiting for the DaemonSet controller"


class Pod(NamedTuple):
    """What is kept of a pod."""

    owner: Key
    name: str
    node: str
    revision: str | None  # of the DaemonSet's template that it was made from
    image: str
    started: str | None  # when its container came up, by the node's clock; None while it is not ready
    settles_at: float  # when it will have been up for long enough, by ours; infinite while it is not up
    reason: str  # what is wrong with it, or was before it came up again
    message: str
    leaving: bool

    def fails(self, clock: float) -> bool:
        """Whether it has a problem; one that restarted has it until it settles, so that a crash loop is one steady failure."""
        return bool(self.reason) and self.settles_at > clock


def keep_pod(obj: dict, old: Pod | None, live: bool) -> Pod:
    meta, spec, status = obj["metadata"], obj["spec"], obj.get("status") or {}
    owner = next((o["name"] for o in meta.get("ownerReferences") or () if o.get("controller") and o["kind"] == "DaemonSet"), "")
    named = lambda containers: next((c for c in containers or () if c["name"] == "scx"), {})  # somebody may inject others
    container = named(status.get("containerStatuses"))
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
    started = (container.get("state", {}).get("running") or {}).get("startedAt") if ready else None
    return Pod((meta["namespace"], owner), meta["name"], sys.intern(spec.get("nodeName") or target_node(spec)),
               (meta.get("labels") or {}).get("pod-template-generation"), sys.intern(named(spec.get("containers")).get("image", "")),
               started, settles_at(started, old, live),
               *pod_problem(meta, status, container), "deletionTimestamp" in meta)


def settles_at(started: str | None, old: Pod | None, live: bool) -> float:
    """When a container will have been up for long enough. One that is seen to come up counts from then, for the node's clock may
    be wrong; one that was up before sked looked counts from its startedAt, so that a restart of sked changes nothing."""
    if not started or old and old.started == started:
        return old.settles_at if started else math.inf
    return time.monotonic() + SETTLE_SECONDS - (0.0 if live else max(0.0, time.time() - epoch(started)))


def target_node(spec: dict) -> str:
    """The node that a DaemonSet's pod is for before it is bound to it; empty where that is not said."""
    with contextlib.suppress(KeyError, IndexError):
        terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        return terms[0]["matchFields"][0]["values"][0]
    return ""


def pod_problem(meta: dict, status: dict, container: dict) -> tuple[str, str]:
    """Reason and message of what is wrong with a pod, or was before its container restarted; empty where nothing is."""
    state, last = container.get("state") or {}, container.get("lastState") or {}
    waiting, died = state.get("waiting") or {}, state.get("terminated") or last.get("terminated")
    if status.get("phase") == "Failed" and status.get("reason"):
        return status["reason"], status.get("message", "")
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing", "CrashLoopBackOff"):
        return waiting["reason"], waiting.get("message", "")
    restarts = container.get("restartCount", 0)
    if died or restarts or waiting.get("reason") == "CrashLoopBackOff":  # what it died of may be forgotten by now
        return "CrashLoopBackOff", crash_message(meta, died or {}, restarts)
    unschedulable = [c for c in status.get("conditions") or () if c["type"] == "PodScheduled" and c.get("reason") == "Unschedulable"]
    return ("Unschedulable", unschedulable[0].get("message", "")) if unschedulable else ("", "")


def crash_message(meta: dict, died: dict, restarts: int) -> str:
    why = f" ({died['reason']})" if died.get("reason") not in (None, "Error") else ""
    words = ": " + " ".join(died["message"].split())[-300:] if died.get("message") else ""
    return (f"exit code {died.get('exitCode', 'unknown')}{why}, {restarts} restart{'s' * (restarts != 1)}{words}; "
            f"see 'kubectl logs -n {meta['namespace']} {meta['name']}{' --previous' * bool(restarts)}'")


def conditions_of(schedext: dict) -> list[dict]:
    """The conditions in its status, as far as they are well-formed."""
    conditions = (schedext.get("status") or {}).get("conditions")
    return [c for c in conditions if isinstance(c, dict) and c.get("type")] if isinstance(conditions, list) else []


def ready_condition(schedext: dict) -> dict:
    return next((condition for condition in conditions_of(schedext) if condition["type"] == "Ready"), {})


def build_status(schedext: dict, daemonset: dict | None, pods: list[Pod], rivals: dict[str, str], refused: bool, blocked: Blocked | None,
                 now: str, clock: float) -> dict:
    """The status of a SchedExt whose DaemonSet and pods are these, now; refused: there have been no pods for too long."""
    meta, before, seen = schedext["metadata"], ready_condition(schedext), daemonset["status"] if daemonset else {}
    failing = sorted((pod for pod in pods if pod.fails(clock)), key=lambda pod: (pod.node, pod.name))
    failures = [build_failure(pod, rivals) for pod in failing]
    nodes = {
        "desired": seen.get("desiredNumberScheduled", 0),
        "ready": sum(pod.settles_at <= clock for pod in pods),
        "updated": seen.get("updatedNumberScheduled", 0),
        "failing": len(failures),
    }
    if blocked:
        reason, message = blocked.reason, str(blocked)
    else:
        reason, message = ready_reason(schedext, daemonset, nodes, failures, pods, refused, clock)
    if reason == "NodesFailing" and not pods:
        nodes["failing"] = nodes["desired"]
    ready = {"type": "Ready", "status": "True" if reason == "AllReady" else "False", "reason": reason, "message": message,
             "observedGeneration": meta["generation"], "lastTransitionTime": now}
    if before.get("status") == ready["status"]:
        ready["lastTransitionTime"] = before.get("lastTransitionTime") or now
    others = [condition for condition in conditions_of(schedext) if condition["type"] != "Ready"]
    return {"observedGeneration": meta["generation"], "nodes": nodes, "conditions": [*others, ready],
            **({"failures": failures[:MAX_FAILURES]} if failures else {})}


def build_failure(pod: Pod, rivals: dict[str, str]) -> dict:
    reason, message = pod.reason, pod.message
    if reason == "CrashLoopBackOff" and pod.node in rivals:
        reason = "AlreadyAttached"
        message = f"the scheduler of SchedExt {rivals[pod.node]} runs here, and a kernel attaches one at a time; {message}"
    return {"node": pod.node, "pod": pod.name, "reason": reason, "message": message[:1000]}


def ready_reason(schedext: dict, daemonset: dict, nodes: dict, failures: list[dict], pods: list[Pod], refused: bool,
                 clock: float) -> tuple[str, str]:
    """Reason and message of the Ready condition where the DaemonSet is as it should be."""
    (namespace, name), desired = key_of(schedext), nodes["desired"]
    if daemonset["status"]["observedGeneration"] < daemonset["metadata"]["generation"]:
        return "RollingOut", NOT_LOOKED
    if not desired:
        labels = ",".join(f"{key}={value}" for key, value in sorted(selector_of(schedext)))
        return "NoNodes", f"no node is there for it: check labels and taints with 'kubectl get nodes{' -l ' * bool(labels)}{labels}'"
    if failures:
        first = failures[0]
        return "NodesFailing", f"failing on {nodes['failing']} of {desired} nodes; {first['node']}: {first['reason']}: {first['message']}"
    if refused:
        return "NodesFailing", (f"{desired} nodes want a pod and none exists: the namespace must allow privileged pods: 'kubectl label --overwrite "
                                f"namespace {namespace} pod-security.kubernetes.io/enforce=privileged'; if it does, see "
                                f"'kubectl describe daemonset -n {namespace} {name}'")
    image = daemonset["spec"]["template"]["spec"]["containers"][0]["image"]  # after a rollback its pods have an old revision
    current = [pod for pod in pods if pod.revision == daemonset["revision"] or pod.image == image]
    if nodes["updated"] >= desired and sum(pod.settles_at <= clock for pod in current) >= desired:
        return "AllReady", f"running on {desired} of {desired} nodes"
    message = f"ready on {nodes['ready']} of {desired} nodes, updated on {nodes['updated']}"
    if any(clock < pod.settles_at < math.inf for pod in pods):
        message += f"; waiting to see them stay up for {SETTLE_SECONDS:.0f} s"
    elif daemonset["spec"].get("updateStrategy", {}).get("type") == "OnDelete" and nodes["updated"] < desired:
        message += f"; updateStrategy is OnDelete: delete the old pods with 'kubectl delete pod -n {namespace} -l name={name}'"
    return "RollingOut", message


# ---------------------------------------------------------------- leader election

LEASE_NAME = "b4c95cb3.schedkit.io"  # the Go operator's, so that the two never act at once
LEASE_SECONDS = 15
RENEW_SECONDS = 2.0
RENEW_DEADLINE_SECONDS = 10.0  # a leader that has not renewed for so long stops, well before another one may start


class Elector:
    """Holds the Lease. That of another has expired when it has not changed for its duration, by our own clock."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api, self.path = api, LEASES.format(f"/namespaces/{namespace}")
        self.identity = f"{socket.gethostname()}_{uuid.uuid4()}"
        self.lease: dict | None = None
        self.seen = self.renewed = -math.inf  # when the lease was seen to change, when we asked for what we hold

    def leads(self) -> bool:
        return time.monotonic() < self.renewed + RENEW_DEADLINE_SECONDS

    def check(self) -> None:
        """Before each write: a leader that was held up for too long (frozen, swapped out) must not write any more."""
        if not self.leads():
            log.critical("the lease was not renewed in time: stopping, for another one may lead now")
            os._exit(1)

    def run(self, operator: Operator) -> None:
        """Wait for the lease, then renew it until the operator stops; exit where that fails for too long."""
        log.info("waiting for the lease as %s", self.identity)
        while not self.leads():
            operator.health.beat("lease", RENEW_DEADLINE_SECONDS + LEASE_SECONDS)
            try:
                self.take()
                operator.report("lease", None)
            except ApiError as error:
                operator.report("lease", str(error))
            if not self.leads() and operator.stop.wait(RENEW_SECONDS / 2):
                return
        log.info("leading")
        while not operator.stop.wait(RENEW_SECONDS):
            operator.health.beat("lease", RENEW_DEADLINE_SECONDS + LEASE_SECONDS)
            self.check()
            with contextlib.suppress(ApiError):
                if not self.take():
                    self.renewed = -math.inf  # another one has it
            self.check()

    def take(self) -> bool:
        """Take or renew the lease if it is ours to have; whether it is."""
        now, leads = time.monotonic(), self.leads()
        timeout = min(RENEW_DEADLINE_SECONDS / 2, self.renewed + RENEW_DEADLINE_SECONDS - now) if leads else RENEW_DEADLINE_SECONDS / 2
        if not leads:
            self.look(timeout)
        try:
            if not self.lease:
                self.lease = self.api.request("POST", self.path, self.claim({"metadata": {"name": LEASE_NAME}}), timeout)
            elif leads or self.expired():
                self.lease = self.api.request("PUT", f"{self.path}/{LEASE_NAME}", self.claim(self.lease), timeout)
            else:
                return False
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            self.look(timeout)  # somebody changed it under our hands, or deleted it
            return leads and (not self.lease or self.lease["spec"].get("holderIdentity") == self.identity)
        self.renewed = now
        return True

    def look(self, timeout: float) -> None:
        lease = self.api.get(f"{self.path}/{LEASE_NAME}", timeout)
        if lease != self.lease:
            self.lease, self.seen = lease, time.monotonic()

    def expired(self) -> bool:
        spec = self.lease.get("spec") or {}
        return not spec.get("holderIdentity") or time.monotonic() > self.seen + spec.get("leaseDurationSeconds", LEASE_SECONDS)

    def claim(self, lease: dict) -> dict:
        """The lease with our name on it; the rest of it stays."""
        spec, now = lease.get("spec") or {}, timestamp("microseconds")
        if spec.get("holderIdentity") != self.identity:
            spec = spec | {"holderIdentity": self.identity, "acquireTime": now, "leaseTransitions": spec.get("leaseTransitions", -1) + 1}
        return lease | {"spec": spec | {"leaseDurationSeconds": LEASE_SECONDS, "renewTime": now}}

    def release(self) -> None:
        """Let another one lead at once."""
        if self.leads():
            spec = self.lease["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": timestamp("microseconds")}
            with contextlib.suppress(ApiError):
                self.api.request("PUT", f"{self.path}/{LEASE_NAME}", self.lease | {"spec": spec}, timeout=0.5)


# ---------------------------------------------------------------- health and metrics


class Health:
    """Signs of life: each thread says by when it will give the next one."""

    def __init__(self) -> None:
        self.due: dict[str, float] = {}

    def beat(self, name: str, seconds: float) -> None:
        self.due[name] = time.monotonic() + seconds

    def spawn(self, name: str, run: Callable, *args: Any) -> threading.Thread:
        """A thread whose death shows."""
        def guarded() -> None:
            try:
                run(*args)
            except Exception:
                log.critical("thread %s died", name, exc_info=True)
                self.due[name] = -math.inf
        self.beat(name, REQUEST_SECONDS)
        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def late(self) -> str:
        return ", ".join(sorted(name for name, due in list(self.due.items()) if due < time.monotonic()))


METRICS = {  # the type of each
    **dict.fromkeys(("controller_runtime_reconcile_total", "workqueue_retries_total", "sked_watch_restarts_total", "sked_api_writes_total",
                     "sked_api_errors_total", "process_cpu_seconds_total"), "counter"),
    **dict.fromkeys(("workqueue_depth", "leader_election_master_status", "sked_schedext_nodes", "sked_build_info",
                     "process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"), "gauge"),
    **dict.fromkeys(("controller_runtime_reconcile_time_seconds", "workqueue_queue_duration_seconds"), "histogram"),
}
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, math.inf)


class Metrics:
    """Counters and histograms, by name and labels."""

    def __init__(self) -> None:
        self.counters: defaultdict[tuple, float] = defaultdict(float)
        self.histograms: defaultdict[tuple, list] = defaultdict(lambda: [0.0] + [0] * len(BUCKETS))  # the sum, then a count a bucket
        self.lock = threading.Lock()
        self.add("process_start_time_seconds", time.time())

    def add(self, metric: str, amount: float = 1.0, **labels: Any) -> None:
        with self.lock:
            self.counters[metric, tuple(labels.items())] += amount

    def observe(self, metric: str, seconds: float, **labels: Any) -> None:
        with self.lock:
            histogram = self.histograms[metric, tuple(labels.items())]
            histogram[0] += seconds
            histogram[1 + bisect.bisect_left(BUCKETS, seconds)] += 1

    def text(self, gauges: dict[tuple, float]) -> str:
        """All of it, as Prometheus reads it."""
        lines = {name: [f"# TYPE {name} {kind}"] for name, kind in METRICS.items()}
        escaped = lambda text: str(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

        def sample(name: str, suffix: str, labels: Iterable[tuple], value: float) -> None:
            pairs = ",".join(f'{label}="{escaped(text)}"' for label, text in labels)
            lines[name].append(f"{name}{suffix}{{{pairs}}} {float(value)!r}")
        with self.lock:
            for (name, labels), value in (self.counters | gauges).items():
                sample(name, "", labels, value)
            for (name, labels), (total, *counts) in self.histograms.items():
                for bound, count in zip(BUCKETS, itertools.accumulate(counts)):
                    sample(name, "_bucket", (*labels, ("le", "+Inf" if bound == math.inf else bound)), count)
                sample(name, "_sum", labels, total)
                sample(name, "_count", labels, sum(counts))
        return "\n".join(itertools.chain.from_iterable(lines.values()))


def gauges(operator: Operator, leads: bool) -> dict[tuple, float]:
    """What is measured when somebody asks."""
    found: dict[tuple, float] = {
        ("workqueue_depth", (("name", "schedext"),)): len(operator.queue.due),
        ("leader_election_master_status", (("name", LEASE_NAME),)): leads,
        ("sked_build_info", (("version", __version__),)): 1,
        ("process_cpu_seconds_total", ()): time.process_time(),
    }
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as statm:
            found["process_resident_memory_bytes", ()] = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        found["process_open_fds", ()] = len(os.listdir("/proc/self/fd"))
    for (namespace, name), schedext in list(operator.schedexts.items.items()):
        for state, count in (schedext["status"].get("nodes") or {}).items():
            found["sked_schedext_nodes", (("namespace", namespace), ("name", name), ("state", state))] = count
    return found


class Reviewer:
    """Asks the API server who may read the metrics; for each token once in a while, and not for too many new ones."""

    KEEP_SECONDS, MOST = 10.0, 100

    def __init__(self, api: Api) -> None:
        self.api, self.lock = api, threading.Lock()
        self.answers: dict[bytes, tuple[float, int]] = {}

    def status(self, authorization: str) -> int:
        """200, or the HTTP status of the refusal."""
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer" or not token.strip():
            return 401
        digest, now = hashlib.sha256(token.encode()).digest(), time.monotonic()
        with self.lock:
            # Whoever was let in has a place for longer, so that strangers cannot crowd out the scraper.
            self.answers = {known: (due, status) for known, (due, status) in self.answers.items() if due + 600 * (status == 200) > now}
            if digest not in self.answers and len(self.answers) >= self.MOST:
                return 429
            if self.answers.get(digest, (0, 0))[0] <= now:
                self.answers[digest] = now + self.KEEP_SECONDS, self.review(token.strip())
            return self.answers[digest][1]

    def review(self, token: str) -> int:
        try:
            answer = self.api.request("POST", "/apis/authentication.k8s.io/v1/tokenreviews", {"spec": {"token": token}}, 5)["status"]
            if not answer.get("authenticated"):
                return 401
            user = answer["user"]
            spec = {"user": user.get("username"), **{field: user.get(field) for field in ("uid", "groups", "extra")},
                    "nonResourceAttributes": {"path": "/metrics", "verb": "get"}}
            answer = self.api.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec}, 5)["status"]
            return 200 if answer.get("allowed") else 403
        except ApiError as error:
            log.warning("cannot find out who may read the metrics: %s", error)
            return 503


class Handler(http.server.BaseHTTPRequestHandler):
    """GET and HEAD of the server's routes."""

    protocol_version, timeout, disable_nagle_algorithm = "HTTP/1.1", 5, True

    def do_GET(self) -> None:
        route = self.server.routes.get(self.path.partition("?")[0])
        self.answer(*(route(self.headers) if route else (404, "not found")))

    do_HEAD = do_GET

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return lambda: self.answer(405, "only GET and HEAD")
        raise AttributeError(name)

    def answer(self, status: int, text: str) -> None:
        body = f"{text.rstrip()}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if status == 405:
            self.send_header("Allow", "GET, HEAD")
            self.close_connection = True  # what else it sent is not read
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """Answers at an address in Go's form (':8081', '127.0.0.1:8081', '[::1]:8081'); a thread a connection, so that none waits for another."""

    request_queue_size = 128

    def __init__(self, address: str, routes: dict[str, Callable], tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            raise ValueError(f"{address!r} is no address such as :8081 or 127.0.0.1:8081")
        self.routes, self.tls, host = routes, tls, host.strip("[]")
        self.address_family = socket.AF_INET6 if ":" in host or not host and socket.has_dualstack_ipv6() else socket.AF_INET
        try:
            super().__init__((host, int(port)), Handler)
        except OSError as error:
            raise ValueError(f"cannot listen at {address}: {error.strerror}") from None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def get_request(self) -> tuple:
        connection, address = super().get_request()
        if self.tls:  # the handshake is for the connection's own thread
            connection = self.tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, *_: Any) -> None:
        log.debug("a connection failed", exc_info=True)


def tls_context(directory: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(os.path.join(directory, "tls.crt"), os.path.join(directory, "tls.key"))
    except OSError as error:
        raise OSError(f"no use can be made of tls.crt and tls.key in {directory}: {error.strerror or error}") from None
    return context


def self_signed() -> ssl.SSLContext:
    """TLS with a certificate of our own making."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3650",
                            "-subj", "/CN=sked", "-keyout", f"{scratch}/tls.key", "-out", f"{scratch}/tls.crt"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(f"no certificate for the metrics, and none could be made ({error}): give one with --metrics-cert-dir, "
                             "install the openssl program, or use --metrics-secure=false") from None
        return tls_context(scratch)


# ---------------------------------------------------------------- the command line


def load_configuration(path: str | None, context: str | None) -> Configuration:
    """How to reach the API server: the flag, else $KUBECONFIG, else from inside a cluster, else ~/.kube/config."""
    configuration = Configuration()
    path = path or os.environ.get("KUBECONFIG")
    if not path and not context and "KUBERNETES_SERVICE_HOST" in os.environ:
        kubeconfig.load_incluster_config(configuration)
        return configuration
    files = [file for file in map(os.path.expanduser, (path or "~/.kube/config").split(os.pathsep)) if os.path.exists(file)]
    if not files:
        raise ValueError(f"no kubeconfig at {path or '~/.kube/config'}: name one with --kubeconfig or $KUBECONFIG")
    for file in files:  # the first one that names a context decides, as for kubectl
        with open(file) as stream:
            loaded = yaml.safe_load(stream) or {}
        if not isinstance(loaded, dict):
            raise ValueError(f"{file} is no kubeconfig")
        context = context or loaded.get("current-context")
    kubeconfig.load_kube_config(os.pathsep.join(files), context, configuration, persist_config=False)
    return configuration


def render(stream: Any) -> str:
    """The DaemonSets of the SchedExts in a YAML stream, as YAML."""
    schedexts = []
    for document in filter(None, yaml.safe_load_all(stream)):
        kind = document.get("kind") if isinstance(document, dict) else type(document).__name__
        if kind != "SchedExt":
            print(f"sked: passed over a {kind}", file=sys.stderr)
        elif not isinstance(document.get("metadata"), dict) or not document["metadata"].get("name"):
            raise ValueError("a SchedExt has no metadata.name")
        else:
            schedexts.append(document)
    if not schedexts:
        raise ValueError("there is no SchedExt in it")
    return yaml.safe_dump_all([build_daemonset(schedext, schedexts) for schedext in schedexts], sort_keys=False)


def go_bool(text: str) -> bool:
    if text.lower() not in ("1", "t", "true", "0", "f", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("1", "t", "true")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("sked", description="Runs sched_ext schedulers on Kubernetes nodes: one SchedExt in, one DaemonSet out.",
                                     allow_abbrev=False)
    flag = parser.add_argument
    switch: dict = {"nargs": "?", "const": True, "type": go_bool, "metavar": "BOOL"}
    flag("--kubeconfig", metavar="FILE", help="how to reach the API server; else $KUBECONFIG, else from inside a cluster, else ~/.kube/config")
    flag("--context", help="the context of the kubeconfig to use")
    flag("--namespace", default="", help="watch this namespace only")
    flag("--render", metavar="FILE", help="print the DaemonSet of a SchedExt manifest ('-': standard input) and exit; needs no cluster")
    flag("--leader-elect", default=False, help="work only while holding the lease, for several replicas", **switch)
    flag("--leader-election-namespace", metavar="NAMESPACE", help="where the lease is; else the pod's own namespace, else $POD_NAMESPACE")
    flag("--health-probe-bind-address", default=":8081", metavar="ADDRESS", help="of /healthz and /readyz; 0: none (default: %(default)s)")
    flag("--metrics-bind-address", default="0", metavar="ADDRESS", help="of /metrics, such as :8443; 0: none (default: %(default)s)")
    flag("--metrics-secure", default=True, help="metrics by HTTPS, to those whom the API server allows (default: true)", **switch)
    flag("--metrics-cert-dir", metavar="DIR", help="tls.crt and tls.key for the metrics; else a self-signed certificate")
    flag("--enable-http2", default=False, help="must be false: HTTP/1.1 is all there is", **switch)
    flag("--log-level", "--zap-log-level", default="info", choices=("debug", "info", "warning", "error"), help="how much to say (default: %(default)s)")
    for name in ("--zap-devel", "--zap-encoder", "--zap-stacktrace-level", "--zap-time-encoding"):
        flag(name, nargs="?", help=argparse.SUPPRESS)  # the Go operator's; they mean nothing here
    flag("--version", action="version", version=__version__)
    args = parser.parse_args([re.sub("^-(?=[a-z]{2})", "--", arg) for arg in (sys.argv[1:] if argv is None else argv)])
    if args.enable_http2:
        parser.error("--enable-http2=true: sked speaks HTTP/1.1 only")
    return args


def lease_namespace(flag: str | None) -> str:
    account = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
    if not flag and os.path.exists(account):
        with open(account) as file:
            return file.read().strip()
    if namespace := flag or os.environ.get("POD_NAMESPACE"):
        return namespace
    raise ValueError("--leader-elect needs a namespace for the lease: name one with --leader-election-namespace")


def serve(args: argparse.Namespace, operator: Operator, leads: Callable[[], bool]) -> None:
    """Start the HTTP servers that are asked for."""
    def healthz(headers: Any) -> tuple[int, str]:
        late = operator.health.late()
        return (503, f"no sign of life from {late}") if late else (200, "ok")

    def readyz(headers: Any) -> tuple[int, str]:
        if not leads():
            return 200, "standing by"
        return (200, "ok") if operator.ready() else (503, "the caches are not filled yet")

    def metrics(headers: Any) -> tuple[int, str]:
        status = reviewer.status(headers.get("Authorization", "")) if args.metrics_secure else 200
        return status, operator.metrics.text(gauges(operator, leads())) if status == 200 else http.HTTPStatus(status).phrase

    if args.health_probe_bind_address != "0":
        Server(args.health_probe_bind_address, {"/healthz": healthz, "/readyz": readyz})
    if args.metrics_bind_address != "0":
        reviewer, tls = Reviewer(operator.api), None
        if args.metrics_secure:
            context = tls_context(args.metrics_cert_dir) if args.metrics_cert_dir else self_signed()
            tls = (lambda: tls_context(args.metrics_cert_dir)) if args.metrics_cert_dir else lambda: context  # theirs may be rotated
        Server(args.metrics_bind_address, {"/metrics": metrics}, tls)


def run(args: argparse.Namespace) -> None:
    """Wire it up, and work until a signal comes."""
    api = Api(lambda: load_configuration(args.kubeconfig, args.context))
    elector = Elector(api, lease_namespace(args.leader_election_namespace)) if args.leader_elect else None
    operator = Operator(api, args.namespace, elector.check if elector else lambda: None)
    signals: queue.SimpleQueue = queue.SimpleQueue()  # a handler runs in this thread, perhaps while it holds the lock of the event itself
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: signals.put(None))
    threading.Thread(target=lambda: (signals.get(), operator.stop.set()), daemon=True).start()
    serve(args, operator, elector.leads if elector else lambda: True)
    log.info("sked %s, for SchedExts in %s, at %s", __version__, args.namespace or "all namespaces", api.host)
    if elector:
        renewal = operator.health.spawn("lease", elector.run, operator)
        while not elector.leads() and not operator.stop.wait(0.05):
            pass
    if operator.run() and elector:
        renewal.join(0.4)  # else its last answer could make ours a conflict
        elector.release()
    log.info("stopped")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)sZ %(levelname)-7s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S")
    logging.getLogger().handlers[0].formatter.converter = time.gmtime
    urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # it was the kubeconfig's choice, and one line a request
    try:
        if not args.render:
            run(args)
        else:
            with contextlib.nullcontext(sys.stdin) if args.render == "-" else open(args.render) as stream:
                print(render(stream), end="")
    except (OSError, ValueError, yaml.YAMLError, kubeconfig.ConfigException) as error:
        print("sked:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
