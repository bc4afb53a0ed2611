# SPDX-License-Identifier: Apache-2.0
"""Run sched_ext schedulers on Kubernetes nodes: one SchedExt in, one DaemonSet out.

    from a SchedExt, its DaemonSet and pods, and the SchedExts that it yields to (Observed)
        plan                     makes the DaemonSet to write, or None if it is as it should be
        summarize, build_status  make the status to show
    watch -> queue -> reconcile: observe, then write the DaemonSet, or else the status

The operator comes first, as pure functions: who runs on a node, the DaemonSet, pods, the stamp and
the plan, the status. Then comes the shell, most of which controller-runtime supplies to an operator
in Go: metrics, the API server, watching, the queue, reconcile, the lease, the command line.

Of the kubernetes package sked uses the credentials and the HTTP client. Its informer fails on
custom resources and does not say when it is filled, its leader election goes by the wall clock and
never releases the lease, and its typed API classes cost up to 27 MiB and drop unknown fields.

Why not server-side apply? It cannot say that a field must be absent: a command, hostPID or a
container that another client adds to the DaemonSet would stay. Here they are removed. Other fields
that no SchedExt sets (initContainers, hostNetwork, lifecycle hooks, ...) are left alone.

Words used throughout, with examples:
    key         namespace and name of a SchedExt, and so of its DaemonSet: ("tools", "scx-rusty")
    selector    the nodeSelector of a SchedExt: {"pool": "latency"}
    winner      a kernel runs one scheduler: of two SchedExts that may meet on a node, the one that
                runs there; the other yields
    twin        a winner with the same selector: it leaves no node to the other
    placement   which nodes a DaemonSet runs on: its nodeSelector and node affinity
    stamp       an annotation in which sked notes on the DaemonSet what it last wrote
    parked      a DaemonSet whose last change affected only its placement: its strategy is
                OnDelete, so that no pod restarts on a node that keeps its scheduler

Four rules keep it simple:
    Only keys travel through the queue. reconcile looks at what there is, not at what woke it.
    Each cache has one writer, its reflector. What sked writes comes back through the watch.
    sked does not act on a DaemonSet older than its own last write.
    sked never deletes anything.
"""

from __future__ import annotations

import argparse
import atexit
import copy
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
from math import inf
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import urlencode

try:
    import urllib3
    import yaml
    from kubernetes import config as kubeconfig
    from kubernetes.client import Configuration
    from kubernetes.client.rest import RESTClientObject
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger
    from kubernetes.utils.keepalive import tcp_keepalive_socket_options
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"sked: {error}: install what it needs with 'pip install -r requirements.txt'")

__version__ = "1.4.0"

Key = tuple[str, str]

API_VERSION = "sked.schedkit.io/v1"
OURS = {"managed-by": "sked-controller"}  # the label of every DaemonSet and pod that sked makes
SELECT_OURS = "managed-by=sked-controller"
FIELD_MANAGER = "sked"  # our name in managedFields
GATHER_SECONDS = 1.0  # changes that can wait are gathered for this long before sked looks at them
BLOCKED_SECONDS = 60.0  # how soon sked looks again at what only someone else can fix

log = logging.getLogger("sked")


class InvalidSpec(ValueError):
    """A SchedExt that cannot become a DaemonSet, and why."""


class Blocked(Exception):
    """The DaemonSet cannot be written now: reason and message for the status."""

    def __init__(self, reason: str, message: str, look_again: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.look_again = look_again  # in seconds


class ApiError(Exception):
    """The API server refused (its HTTP status) or gave no usable answer (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def is_outage(self) -> bool:
        """Whether the API server is down: a load balancer in front of it then says 502 to 504."""
        return self.status in (0, 502, 503, 504)


def metadata_of(manifest: dict) -> dict:
    """Empty if the manifest has no metadata, or something else in that place."""
    meta = manifest.get("metadata")
    return meta if isinstance(meta, dict) else {}


def key_of(obj: dict) -> Key:
    """Namespace and name, as far as a manifest has them."""
    meta = metadata_of(obj)
    return str(meta.get("namespace") or ""), str(meta.get("name") or "")


def controller_of(obj: dict) -> dict:
    """The owner reference of an object's controller, or {}."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), {})


def timestamp(style: str = "%Y-%m-%dT%H:%M:%SZ") -> str:
    """Now, as the API writes it."""
    return datetime.now(timezone.utc).strftime(style)


def unix_time(text: str) -> float:
    """A timestamp of the API, in seconds."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def backoff(failures: int, most: float) -> float:
    """Seconds to wait after this many failures in a row: about 1, 2, 4, ..."""
    doublings = min(failures - 1, 20)
    return min(most, 2.0**doublings) * random.uniform(0.75, 1.0)


# ---------------------------------------------------------------- who runs on a node

NOWHERE = "sked.schedkit.io/suspended"  # a label that no node has
MAX_TERMS = 100  # of a node affinity

Pairs = frozenset  # of (label, value): a selector, or a part of one


class Claim(NamedTuple):
    """What the other SchedExts must know of one, for instance

        ("tools", "scx-lavd"), (-1, "2026-11-19T08:00:00Z", ...), {"pool": "latency"}, False, False

    Where two may meet on a node, the smaller rank wins: the one with more pairs in its selector,
    then the older one, then by namespace and name.
    """

    key: Key
    rank: tuple
    selector: dict
    is_suspended: bool
    is_leaving: bool  # it is being deleted

    def name(self) -> str:
        return "/".join(self.key)

    def rivals(self, others: Iterable[Claim]) -> list[Claim]:
        """Those of the others that may meet this one on a node: a label has one value there."""
        for label, value in self.selector.items():
            others = [other for other in others if other.selector.get(label, value) == value]
        return [other for other in others if other.key != self.key]

    def winners(self, others: Iterable[Claim]) -> list[Claim]:
        """Those of the others to which this one yields."""
        return [rival for rival in self.rivals(others) if rival.rank < self.rank]


def claim_of(schedext: dict) -> Claim:
    """The claim of a SchedExt, which may not have been checked yet."""
    key, meta = key_of(schedext), metadata_of(schedext)
    spec = schedext.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    selector = spec.get("nodeSelector")
    pairs = selector.items() if isinstance(selector, dict) else ()
    created = str(meta.get("creationTimestamp") or "not yet")  # sorts after every timestamp
    return Claim(
        key=key,
        rank=(-len(pairs), created, key),
        selector={str(label): str(value) for label, value in pairs},
        is_suspended=bool(spec.get("suspend")),
        is_leaving="deletionTimestamp" in meta,
    )


def twin_of(claim: Claim, winners: list[Claim]) -> Claim | None:
    """The first of the winners with the same selector, if any: it leaves no node to this one."""
    twins = [winner for winner in winners if winner.selector == claim.selector]
    return min(twins, key=lambda twin: twin.rank, default=None)


def placement(claim: Claim, winners: list[Claim]) -> dict:
    """The nodeSelector and affinity of a SchedExt's pods."""
    if claim.is_suspended or twin_of(claim, winners):
        return {"nodeSelector": claim.selector | {NOWHERE: "true"}}
    return {"nodeSelector": claim.selector, "affinity": affinity(claim, winners)}


def affinity(claim: Claim, winners: list[Claim]) -> dict | None:
    """What keeps pods off the nodes of the winners. A suspended winner keeps its nodes, too.

    Beside winners with {a: 1, b: 2} and {c: 3}, a SchedExt for all nodes gets those where
    "not a=1 and not c=3" or "not b=2 and not c=3": a node is free if, for each winner, it lacks
    one pair, so there is a term (terms are ORed) for each way to pick one pair of every winner.
    """
    # No extra is empty: a winner has at least as many pairs, and here none of them is a twin.
    extras = {Pairs(winner.selector.items() - claim.selector.items()) for winner in winners}
    if not extras:
        return None
    terms = {Pairs()}
    # the shortest first, so that there are few terms on the way
    for extra in sorted(extras, key=lambda pairs: (len(pairs), sorted(pairs))):
        # A term that has a pair of this winner excludes its nodes already.
        done = {term for term in terms if term & extra}
        terms = done | {term | {pair} for term in terms - done for pair in extra}
        if len(terms) > MAX_TERMS:  # before the next step, which takes quadratic time
            raise InvalidSpec(
                "too many node pools: yielding to the SchedExts that win takes too many affinity "
                "terms, so the DaemonSet is not written; use one label with a different value for "
                "each pool"
            )
        # A term that contains another one adds nothing.
        terms = {term for term in terms if not any(other < term for other in terms)}
    rules = {"nodeSelectorTerms": [not_in(term) for term in sorted(terms, key=sorted)]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": rules}}


def not_in(pairs: Pairs) -> dict:
    """The affinity term for nodes that have none of the pairs. One that lacks a label matches."""
    values = defaultdict(list)
    for label, value in sorted(pairs):
        values[label].append(value)
    return {
        "matchExpressions": [
            {"key": label, "operator": "NotIn", "values": values[label]} for label in values
        ]
    }


# ---------------------------------------------------------------- the DaemonSet

SCX, PROBE = "scx", "probe"  # the containers that sked puts into a pod
# The fields of a SchedExt's spec. First those that are passed through as they are, by their place:
DAEMONSET_FIELDS = {"updateStrategy": dict, "minReadySeconds": int}
POD_FIELDS = {
    "tolerations": list,
    "priorityClassName": str,
    "imagePullSecrets": list,
    "hostPID": bool,
}
CONTAINER_FIELDS = {
    "args": list,
    "env": list,
    "resources": dict,
    "imagePullPolicy": str,
    "terminationMessagePolicy": str,
}
FIELDS = {
    "sched": str,
    "nodeSelector": dict,
    "suspend": bool,
    "hostPaths": list,
    "probeImage": str,
    **DAEMONSET_FIELDS,
    **POD_FIELDS,
    **CONTAINER_FIELDS,
}
KINDS = {str: "text", dict: "a map", list: "a list", bool: "true or false", int: "a whole number"}
# The probe asks the kernel whether a scheduler is attached. It is ready once one is, and ends when
# none has been for 8 s (some re-attach on CPU hotplug). If none attaches within 30 s, the kubelet
# ends it by SIGTERM, which PID 1 would ignore without a trap.
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
terminationMessagePolicy: File
""")


def check_spec(schedext: dict) -> None:
    """Raise InvalidSpec if no DaemonSet can be made of this."""
    meta, spec = metadata_of(schedext), schedext.get("spec")
    if schedext.get("apiVersion", API_VERSION) != API_VERSION:
        raise InvalidSpec(f"apiVersion must be {API_VERSION}, not {schedext['apiVersion']}")
    name = meta.get("name")
    part = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
    is_text = isinstance(name, str) and len(name) <= 63
    if not is_text or not re.fullmatch(rf"{part}(\.{part})*", name):
        raise InvalidSpec(
            "metadata.name must be text of at most 63 lower-case letters, digits, '-' and '.', "
            f"beginning and ending with a letter or digit, not {name!r}"
        )
    if not isinstance(spec, dict) or not spec.get("sched"):
        raise InvalidSpec("spec.sched is missing: it names the image of a scheduler")
    for field, value in spec.items():
        if field not in FIELDS:
            raise InvalidSpec(f"spec.{field}: unknown field")
        kind = FIELDS[field]
        if value is not None and type(value) is not kind:  # not isinstance: True is an int
            raise InvalidSpec(f"spec.{field} must be {KINDS[kind]}, not {value!r}")
    for pair in (spec.get("nodeSelector") or {}).items():
        for text in pair:
            if not isinstance(text, str):
                raise InvalidSpec(f"spec.nodeSelector needs text: put '{text}' in quotes")


def build_daemonset(schedext: dict, yields_to: Iterable[dict] = ()) -> dict:
    """The DaemonSet of a SchedExt. It stays off the nodes of those in yields_to that win.

    Raises InvalidSpec, a ValueError, if none can be made.
    """
    others = [claim_of(other) for other in yields_to]
    return daemonset_beside(claim_of(schedext).winners(others), schedext)


def daemonset_beside(winners: list[Claim], schedext: dict) -> dict:
    """The DaemonSet of a SchedExt that yields to these winners."""
    check_spec(schedext)
    meta, spec = schedext["metadata"], schedext["spec"]
    name = meta["name"]
    owner = {
        "apiVersion": API_VERSION,
        "kind": "SchedExt",
        "name": name,
        "uid": meta.get("uid"),
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {
        "name": name,
        "namespace": meta.get("namespace"),
        "labels": OURS,
        "ownerReferences": [owner] if meta.get("uid") else [],  # --render has none
    }
    volumes = [(f"host-{n}", path) for n, path in enumerate(spec.get("hostPaths") or ())]
    scx = {
        "name": SCX,
        "image": spec["sched"],
        **{field: spec.get(field) for field in CONTAINER_FIELDS},
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in volumes],
    }
    containers = [without_blanks(scx)]
    if spec.get("probeImage"):
        containers.append(PROBE_CONTAINER | {"image": spec["probeImage"]})
    pod = {
        "containers": containers,
        **placement(claim_of(schedext), winners),
        **{field: spec.get(field) for field in POD_FIELDS},
        "volumes": [{"name": volume, "hostPath": {"path": path}} for volume, path in volumes],
    }
    daemonset_spec = {
        "selector": {"matchLabels": {"name": name}},
        **{field: spec.get(field) for field in DAEMONSET_FIELDS},
        "template": {"metadata": {"labels": {"name": name, **OURS}}, "spec": without_blanks(pod)},
    }
    daemonset = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": without_blanks(metadata),
        "spec": without_blanks(daemonset_spec),
    }
    # A copy, which shares nothing with us or the SchedExt. default=str: YAML may have parsed an
    # unquoted string as a date.
    return json.loads(json.dumps(daemonset, default=str))


def without_blanks(fields: dict) -> dict:
    """Without fields that are empty, false or 0: leaving these out means the same."""
    return {field: value for field, value in fields.items() if value}


class Counts(NamedTuple):
    """Nodes, as the status of a DaemonSet counts them."""

    desired: int  # that should have a pod
    current: int  # those of them that have one
    updated: int  # those of them whose pod is of the current template
    ready: int  # those of them whose pod is ready
    misscheduled: int  # that have a pod and should not


def counts_of(daemonset: dict) -> Counts:
    status = daemonset["status"]
    return Counts(
        desired=status.get("desiredNumberScheduled", 0),
        current=status.get("currentNumberScheduled", 0),
        updated=status.get("updatedNumberScheduled", 0),
        ready=status.get("numberReady", 0),
        misscheduled=status.get("numberMisscheduled", 0),
    )


def generation_of(daemonset: dict) -> int:
    """The API server's count of changes of the spec, starting at 1."""
    return daemonset["metadata"]["generation"]


def is_observed(daemonset: dict) -> bool:
    """Whether its status describes its current spec."""
    return daemonset["status"].get("observedGeneration") == generation_of(daemonset)


# ---------------------------------------------------------------- pods

CRASHED = "CrashLoopBackOff"  # also used for a container that crashed and is running again
# How long a pod must stay up before it counts as ready: a scheduler that cannot attach runs for
# about two seconds at every try, and looks ready meanwhile.
SETTLE_SECONDS = 10.0
CANNOT_RUN = (126, 127, 128)  # exit codes: the shell or the container runtime found no program

Problem = tuple[str, str]  # reason and message, two empty strings if there is none


def settle_seconds(daemonset: dict) -> float:
    """SETTLE_SECONDS for the pods of this DaemonSet: minReadySeconds, if that is longer."""
    return max(SETTLE_SECONDS, daemonset["spec"].get("minReadySeconds", 0))


class Pod(NamedTuple):
    """What sked keeps of a pod. If two are equal, nothing has changed that sked cares about.

    An example, with sked's clock (monotonic) in seconds:
        100  its containers start and crash at once:  reason "CrashLoopBackOff", up_since None
        110  they run again, and are ready:           started "...:10Z", is_up, up_since 110
        120  it has settled, so the crash no longer counts
        500  unready while its kubelet restarts:      not is_up, but still up_since 110
    """

    key: Key  # of its DaemonSet, and so of its SchedExt
    daemonset_uid: str
    name: str
    node: str
    revision: str  # the hash of the template that it was made from
    template_generation: str  # which change of the template that was: the DaemonSet counts them
    started: str  # when its containers started, by the node's clock; empty unless all of them run
    is_up: bool  # all of sked's containers are running and ready
    up_since: float | None  # when it came up after its last start, by monotonic(); or None
    reason: str  # of its last failure, even if it is up again
    message: str

    def settles_in(self, now: float, settle: float) -> float:
        """Seconds until it has been up for long enough; not positive once it has settled."""
        return inf if self.up_since is None else self.up_since + settle - now

    def is_failing(self, now: float, settle: float) -> bool:
        """After a failure it fails until it settles, so a crash loop is one steady failure."""
        return bool(self.reason) and self.settles_in(now, settle) > 0


def last_end(container: dict) -> dict:
    """How a container ended, if it ever did."""
    state, earlier = container.get("state", {}), container.get("lastState", {})
    return state.get("terminated") or earlier.get("terminated", {})


def final_message(died: dict) -> str:
    """The end of a container's termination message, in one line."""
    lines = (" ".join(line.split()) for line in died.get("message", "").splitlines())
    return " | ".join(line for line in lines if line)[-300:]


def container_problem(container: dict, where: str) -> Problem:
    """What is wrong with a container, or was before it restarted.

    where: how to name its pod to kubectl, for instance "-n tools scx-rusty-x2x7p".
    """
    waiting = container.get("state", {}).get("waiting", {})
    died = last_end(container)
    restarts = container.get("restartCount", 0)
    reason = waiting.get("reason") or (CRASHED if died or restarts else "")
    if reason in ("ContainerCreating", "PodInitializing"):
        return "", ""
    if reason != CRASHED:
        return reason, waiting.get("message", "")
    message = f"exit code {died.get('exitCode', 'unknown')}"
    if died.get("reason", "Error") != "Error":
        message += f" ({died['reason']})"
    if restarts:
        message += f", {restarts} restart{'' if restarts == 1 else 's'}"
    if words := final_message(died):
        message += f": {words}"
    if died.get("exitCode") in CANNOT_RUN:  # then there is no log
        return CRASHED, f"{message}; see 'kubectl describe pod {where}'"
    previous = " --previous" if restarts else ""
    return CRASHED, f"{message}; see 'kubectl logs {where} -c {container['name']}{previous}'"


def probe_problem(probe: dict, where: str) -> Problem:
    """The probe ends when no scheduler is attached, unless it could not run at all."""
    reason, message = container_problem(probe, where)
    died = last_end(probe)
    if reason == CRASHED and died.get("exitCode") not in CANNOT_RUN:
        message = final_message(died) or "no scheduler is attached"
        return "NotAttached", f"{message}; its log may say why: 'kubectl logs {where} -c {SCX}'"
    if reason:
        message = f"the probe does not run (its image needs sh and grep): {message}"
    return reason, message


def scx_had_settled(scx: dict, probe: dict) -> bool:
    """Whether scx runs, and had settled when the probe ended: then its own last crash is over."""
    started = scx["state"].get("running", {}).get("startedAt")
    ended = last_end(probe).get("finishedAt")  # null if the kubelet lost the container
    if not started or not ended:
        return False
    return unix_time(ended) - unix_time(started) > SETTLE_SECONDS


def pod_problem(meta: dict, status: dict, containers: dict) -> Problem:
    """What is wrong with a pod, or was before its containers restarted."""
    if status.get("reason"):  # it was evicted, for instance
        return status["reason"], status.get("message", "")
    for item in status.get("conditions") or ():
        if item.get("reason") == "Unschedulable":
            return "Unschedulable", item.get("message", "")
    where = f"-n {meta['namespace']} {meta['name']}"
    scx, probe = containers.get(SCX, {}), containers.get(PROBE, {})
    reason, message = container_problem(scx, where)
    # If scx had settled since its last crash, it is the end of the probe that counts.
    if not reason or scx_had_settled(scx, probe):
        return probe_problem(probe, where)
    return reason, message


def came_up_at(started: str, is_up: bool, old: Pod | None, now: float) -> float | None:
    """When the containers of a pod came up, by monotonic(); None until they do."""
    if old and old.up_since is not None and old.started == started:
        return old.up_since  # they have not restarted since, even if unready for a moment
    if not is_up:
        return None
    if old:
        return now  # we saw it, and need not trust the node's clock
    # They came up before sked started, and restarting sked must not reset their age.
    return now - max(0.0, time.time() - unix_time(started))


def target_node(spec: dict) -> str:
    """The node that a DaemonSet's pod is meant for before it is bound."""
    with suppress(KeyError, IndexError):
        rules = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return rules["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
    return ""


def read_pod(obj: dict, old: Pod | None, now: float) -> Pod:
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
        up_since=came_up_at(started, is_up, old, now),
        reason=reason,
        message=message[:1000],
    )


# ---------------------------------------------------------------- the stamp

STAMP = "sked.schedkit.io/applied"  # the annotation
RESTARTED = "kubectl.kubernetes.io/restartedAt"  # the annotation of kubectl rollout restart
PLACEMENT_FIELDS = ("nodeSelector", "affinity")


class Stamp(NamedTuple):
    """What sked notes on the DaemonSet with each write, for instance

        {"wish": "5f0c...", "runs": "91be...", "parked": false, "generation": 4}

    If sked wants a DaemonSet with another hash now, it wants something new. If not, and the
    DaemonSet still has this generation, it is as sked left it, whatever admission made of that.
    If it has another generation, someone else has edited it since.

    plan guesses the generation, and sked corrects it when the API server has answered. One that is
    too low is safe: sked takes its own write for an edit and writes again. 0 means unknown.
    """

    wish: str  # hash of the DaemonSet that sked wanted; empty makes the next pass write again
    runs: str  # hash of the part of it that pods must restart for
    parked: bool
    generation: int  # the one that this write leads to

    def text(self) -> str:
        return json.dumps(self._asdict())


NO_STAMP = Stamp("", "", False, 0)


def stamp_of(daemonset: dict) -> Stamp:
    """NO_STAMP if there is none, or nonsense."""
    text = daemonset["metadata"].get("annotations", {}).get(STAMP, "")
    with suppress(TypeError, ValueError, RecursionError):  # anybody may have written anything
        stamp = Stamp(**json.loads(text))
        if [type(value) for value in stamp] == [str, str, bool, int]:
            return stamp
    return NO_STAMP


def is_never_written(daemonset: dict) -> bool:
    """Whether sked never wrote it: then its stamp is a copy, as kubectl replace --force makes."""
    writers = [entry.get("manager") for entry in daemonset["metadata"].get("managedFields", ())]
    return bool(writers) and FIELD_MANAGER not in writers


def with_stamp(daemonset: dict, stamp: Stamp) -> dict:
    meta = daemonset["metadata"]
    annotations = meta.get("annotations", {}) | {STAMP: stamp.text()}
    return daemonset | {"metadata": meta | {"annotations": annotations}}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def digest_of_runs(wanted: dict, have: dict | None) -> str:
    """A hash of the template without its placement.

    The time of the last kubectl rollout restart is part of it, so pods must restart for that, too.
    """
    template = wanted["spec"]["template"]
    pod = {k: v for k, v in template["spec"].items() if k not in PLACEMENT_FIELDS}
    restarted = have and have["spec"]["template"]["metadata"].get("annotations", {}).get(RESTARTED)
    return digest([template["metadata"], pod, restarted])


# ---------------------------------------------------------------- the plan

# The fields that sked sets to what is wanted, or removes, apart from placement and containers:
OWN_DAEMONSET_FIELDS = ("selector", *DAEMONSET_FIELDS)
OWN_POD_FIELDS = (*POD_FIELDS, "volumes")
OWN_CONTAINER_FIELDS = ("image", "command", *CONTAINER_FIELDS, "securityContext", "volumeMounts")


class Observed(NamedTuple):
    """What sked sees of one SchedExt."""

    schedext: dict
    daemonset: dict | None
    stamp: Stamp  # of the DaemonSet
    pods: list[Pod]  # of the DaemonSet
    winners: list[Claim]  # of the SchedExts that it yields to
    is_fighting: bool = False  # others keep changing the DaemonSet, and sked is backing off


def pod_spec(daemonset: dict) -> dict:
    return daemonset["spec"]["template"]["spec"]


def check_control(schedext: dict, daemonset: dict) -> None:
    """Raise Blocked unless the DaemonSet is ours, or has our label and no owner: it is adopted."""
    namespace, name = key_of(schedext)
    meta = daemonset["metadata"]
    owner = controller_of(daemonset)
    is_leaving = "deletionTimestamp" in meta
    if owner.get("uid") == schedext["metadata"]["uid"] and not is_leaving:
        return
    is_of_predecessor = (owner.get("kind"), owner.get("name")) == ("SchedExt", name)
    if is_leaving or is_of_predecessor:
        message = f"waiting for the old DaemonSet {name} to be deleted"
        raise Blocked("RollingOut", message, BLOCKED_SECONDS)
    is_orphan = not owner and OURS.items() <= meta.get("labels", {}).items()
    if not is_orphan or daemonset["spec"]["selector"] != {"matchLabels": {"name": name}}:
        raise Blocked(
            "NameTaken",
            f"a DaemonSet {name} exists that is not sked's: give this SchedExt another name, or "
            f"delete that DaemonSet with 'kubectl delete daemonset -n {namespace} {name}'; sked "
            "looks again within a minute",
            BLOCKED_SECONDS,
        )


def revisions_of(pods: list[Pod]) -> set[str]:
    return {pod.revision for pod in pods}


def has_current_pod(daemonset: dict, pods: list[Pod]) -> bool:
    """Whether one of the pods was made from the current template."""
    annotations = daemonset["metadata"].get("annotations", {})
    current = annotations.get("deprecated.daemonset.template.generation")
    return any(pod.template_generation == current for pod in pods)


def is_rolled_out(daemonset: dict, pods: list[Pod]) -> bool:
    """Whether all pods are of the current template, also if there is none."""
    counts = counts_of(daemonset)
    if not pods and not counts.current and not counts.misscheduled:
        return True
    all_updated = 0 < counts.current == counts.updated
    if all_updated and not counts.misscheduled:
        return True
    # The counts leave out misscheduled pods, which are on lost and tainted nodes. With such pods,
    # all pods must have one revision, and the counts or the generation of one pod must show that it
    # is the current one. (The generations alone would not do: if the template was changed and
    # changed back, current pods may have an older one.)
    return len(revisions_of(pods)) == 1 and (all_updated or has_current_pod(daemonset, pods))


def placement_differs(have: dict, wanted: dict) -> bool:
    """Whether the wanted placement differs from the present one."""
    old, new = pod_spec(have), pod_spec(wanted)
    return any(old.get(field) != new.get(field) for field in PLACEMENT_FIELDS)


def needs_parking(observed: Observed, wanted: dict) -> bool:
    """Whether sked must park the DaemonSet to write what is wanted, so that no pod restarts for it.

    Raises Blocked until the controller has observed the last change.
    """
    have, pods = observed.daemonset, observed.pods
    if is_observed(have) and not pods and not any(counts_of(have)):
        return False  # no pod could restart, so this also ends parking
    if observed.stamp.parked:
        return True  # its pods are of an earlier template, and stay as they are
    if not placement_differs(have, wanted):
        return False  # the template stays as it is
    if not is_observed(have):
        raise Blocked("RollingOut", "waiting for the DaemonSet controller", GATHER_SECONDS)
    # Parking in the middle of a rollout would leave the old pods as they are.
    return is_rolled_out(have, pods)


def by_name(containers: list) -> dict:
    return {container["name"]: container for container in containers}


def set_fields(target: dict, wanted: dict, fields: Iterable[str]) -> None:
    """Set these fields of target to what is wanted, and remove those that are not wanted."""
    for field in fields:
        if field in wanted:
            target[field] = wanted[field]
        else:
            target.pop(field, None)


def merged_metadata(have: dict, wanted: dict) -> dict:
    """The metadata with our label and our owner reference. Those of others stay."""
    meta = have["metadata"]
    owners = [*(meta.get("ownerReferences") or ()), *wanted["metadata"]["ownerReferences"]]
    return meta | {
        "labels": meta.get("labels", {}) | OURS,
        "ownerReferences": list({owner["uid"]: owner for owner in owners}.values()),
    }


def merged_spec(have: dict, wanted: dict, parked: bool, with_template: bool) -> dict:
    """The spec in which the fields that sked owns are as wanted. All others stay.

    Without the template, only its placement is set: then the rest stays as admission made it, and
    no pod must restart.
    """
    spec = copy.deepcopy(have)
    template, pod = spec["template"], spec["template"]["spec"]
    wanted_pod = wanted["template"]["spec"]
    set_fields(spec, wanted, OWN_DAEMONSET_FIELDS)
    set_fields(pod, wanted_pod, PLACEMENT_FIELDS)
    if parked:
        spec["updateStrategy"] = {"type": "OnDelete"}
    if with_template:
        set_fields(pod, wanted_pod, OWN_POD_FIELDS)
        labels = template["metadata"].get("labels", {}) | wanted["template"]["metadata"]["labels"]
        template["metadata"]["labels"] = labels
        there = by_name(pod["containers"])
        pod["containers"] = []
        for container in wanted_pod["containers"]:
            target = there.get(container["name"], {})
            # Of the probe sked owns every field that it sets, such as startupProbe.
            set_fields(target, container, {*OWN_CONTAINER_FIELDS} | container.keys())
            pod["containers"].append(target)
    return spec


def plan(observed: Observed) -> dict | None:
    """The DaemonSet to write, with its stamp; None if there is nothing to change.

    Raises InvalidSpec if none can be made, and Blocked if it must not be written, or not yet.
    """
    have, old = observed.daemonset, observed.stamp
    wanted = daemonset_beside(observed.winners, observed.schedext)
    wish, runs = digest(wanted), digest_of_runs(wanted, have)
    if not have:
        return with_stamp(wanted, Stamp(wish, runs, parked=False, generation=1))
    check_control(observed.schedext, have)
    generation = generation_of(have)
    is_edited = generation != old.generation  # by someone else, since our last write
    must_restart = runs != old.runs
    if must_restart:
        parked = False
    elif is_edited:
        # If the edit set another strategy, the controller may have made pods from it already.
        is_on_delete = have["spec"]["updateStrategy"]["type"] == "OnDelete"
        parked = old.parked and (is_on_delete or not has_current_pod(have, observed.pods))
        if wish != old.wish and placement_differs(have, wanted) and not observed.is_fighting:
            # Other nodes are wanted, too, but it is too late for parking: pods may have been
            # replaced after the edit. So undo the edit, but keep the placement that is there. The
            # empty wish makes the next pass, which can park, write the new placement. (In a fight,
            # there would be another edit by then.)
            wish = ""
            set_fields(pod_spec(wanted), pod_spec(have), PLACEMENT_FIELDS)
    elif wish == old.wish:
        # Parking ends once all pods are of the current template anyway. Without pods, it can stay.
        is_over = observed.pods and is_observed(have) and is_rolled_out(have, observed.pods)
        parked = old.parked and not is_over
    else:
        parked = needs_parking(observed, wanted)
    spec = have["spec"]
    if is_edited or (wish, runs, parked) != (old.wish, old.runs, old.parked):
        # What admission made of the template stays, unless pods must restart or it was edited.
        spec = merged_spec(spec, wanted["spec"], parked, with_template=is_edited or must_restart)
    if spec != have["spec"] and not is_edited:
        # A guess: the write raises it. If it undoes an edit, it may restore only defaults, which
        # does not, and a number that is too high could hide the next edit.
        generation += 1
    target = have | {"metadata": merged_metadata(have, wanted), "spec": spec}
    target = with_stamp(target, Stamp(wish, runs, parked, generation))
    return target if target != have else None


# ---------------------------------------------------------------- what a write changed


def merge_patch(before: dict, after: dict) -> dict:
    """The JSON merge patch that turns one object into the other: null removes a field."""
    patch = {}
    for name in before | after:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            if inner := merge_patch(old, new):
                patch[name] = inner
        elif new != old:
            patch[name] = new
    return patch


def is_repair(have: dict, old: Stamp, new: Stamp) -> bool:
    """Whether a write wants nothing new: then it undoes what someone else has changed.

    (Or it ends parking, which drift_message knows.)
    """
    put_off = ""  # plan undoes an edit first
    copied = stamp_of(have).wish  # not the old one if someone has replaced it by an edited copy
    return new.wish in (put_off, old.wish, copied)


def different_paths(before: Any, after: Any, path: str) -> Iterator[str]:
    """Where two values differ. An empty one counts as none."""
    if path == "spec.template.spec.containers":
        before, after = by_name(before), by_name(after)
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from different_paths(before.get(name), after.get(name), f"{path}.{name}")
    elif before != after and (before or after):
        yield path


def changed_fields(before: dict, after: dict) -> list[str]:
    """The paths at which two states of a DaemonSet differ, both as the API server gave them."""
    paths = list(different_paths(before["spec"], after["spec"], "spec"))
    for field, default in (("labels", {}), ("ownerReferences", [])):
        old, new = before["metadata"].get(field, default), after["metadata"].get(field, default)
        paths += different_paths(old, new, f"metadata.{field}")
    if stamp_of(before) == NO_STAMP:
        paths.append(f"metadata.annotations.{STAMP}")  # it is missing
    return paths


def last_editor(daemonset: dict) -> str:
    """Who has changed it since our last write, as far as managedFields show.

    They do not show who removed a field. Writers of the status do not count.
    """
    ours, theirs = "", ("", "")
    for entry in daemonset["metadata"].get("managedFields", ()):
        when, manager = entry.get("time", ""), entry.get("manager", "")
        if manager == FIELD_MANAGER:
            ours = max(ours, when)
        elif not entry.get("subresource"):
            theirs = max(theirs, (when, manager))
    when, manager = theirs
    return manager if manager and when >= ours else "an unknown client"


def listed(names: list[str]) -> str:
    """At most five of them."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def drift_message(observed: Observed, changes: list[str], parked: bool) -> str:
    """What a repair has undone; empty if it was nothing that sked owns.

    parked: whether the DaemonSet is parked after it.
    """
    if not observed.daemonset:
        return "the DaemonSet was deleted; sked has created it again"
    if observed.stamp.parked and not parked:  # sked itself has ended parking
        changes = [path for path in changes if not path.startswith("spec.updateStrategy")]
    if not changes:
        return ""
    return f"{last_editor(observed.daemonset)} changed {listed(changes)}; sked has reverted it"


# ---------------------------------------------------------------- status

MAX_FAILURES = 10  # listed in a status
STALLING = ("NameTaken", "Conflict", "Rejected")  # reasons that waiting does not fix
WARNINGS = ("NodesFailing", "NoNodes", *STALLING)  # reasons that are worth an event


class Summary(NamedTuple):
    """What the counts of a DaemonSet and its pods add up to."""

    desired: int = 0  # nodes that should have a pod
    ready: int = 0  # those where it has settled
    updated: int = 0  # those where it runs what is wanted now
    failing: int = 0  # those where it fails, or that have had no pod for a while
    lacking: int = 0  # those that have no pod
    failing_pods: tuple[Pod, ...] = ()  # sorted by node
    settling: int = 0  # pods that are up and have not settled
    next_settles_in: float = inf  # seconds until the next pod has settled


def summarize(observed: Observed, unchanged_for: float, now: float) -> Summary:
    """The numbers for the status. The counts have been the same for unchanged_for seconds."""
    schedext, daemonset, pods = observed.schedext, observed.daemonset, observed.pods
    if not daemonset or controller_of(daemonset).get("uid") != schedext["metadata"]["uid"]:
        return Summary()  # it is not ours
    counts = counts_of(daemonset)
    settle = settle_seconds(daemonset)
    failing_pods = [pod for pod in pods if pod.is_failing(now, settle)]
    up = [pod for pod in pods if pod.is_up]
    settling = sum(pod.settles_in(now, settle) > 0 for pod in up)
    waits = [pod.settles_in(now, settle) for pod in pods]
    lacking = counts.desired - counts.current
    missing = lacking if unchanged_for >= SETTLE_SECONDS else 0
    # The smaller number: pods on lost nodes may still count as up. It may be low for a moment.
    ready = max(0, min(len(up), counts.ready) - settling)
    # Pods on lost nodes may fail, too, but these nodes are not desired.
    failing = min(counts.desired - ready, len(failing_pods) + missing)
    return Summary(
        desired=counts.desired,
        ready=ready,
        # Parked pods are of an earlier template, but run what is wanted.
        updated=counts.current if observed.stamp.parked else counts.updated,
        failing=failing,
        lacking=lacking,
        failing_pods=tuple(sorted(failing_pods, key=lambda pod: pod.node)) if failing else (),
        settling=settling,
        next_settles_in=min((wait for wait in waits if wait > 0), default=inf),
    )


def next_change_in(summary: Summary, unchanged_for: float, blocked: Blocked | None) -> float:
    """Seconds until time alone may change the status."""
    waits = [summary.next_settles_in]
    if blocked:
        waits.append(blocked.look_again)
    if summary.lacking and unchanged_for < SETTLE_SECONDS:
        waits.append(SETTLE_SECONDS - unchanged_for)
    return min(waits)


def conflict_message(twin: Claim) -> str:
    suspended = ", which is suspended," if twin.is_suspended else ""
    return (
        f"SchedExt {twin.name()}{suspended} selects the same nodes and is older: delete one of the "
        "two, or give this one another nodeSelector"
    )


def no_nodes_message(claim: Claim, winners: list[Claim]) -> str:
    pairs = ",".join(f"{label}={value}" for label, value in sorted(claim.selector.items()))
    command = f"kubectl get nodes --selector={pairs}" if pairs else "kubectl get nodes"
    message = f"no node to run on: check that '{command}' lists nodes, and their taints"
    if winners:
        names = listed(sorted(winner.name() for winner in winners))
        message += f"; if it does, these SchedExts may come first there: {names}"
    return message


def failing_message(observed: Observed, summary: Summary) -> str:
    namespace, name = key_of(observed.schedext)
    message = f"failing on {summary.failing} of {summary.desired} nodes; "
    if summary.failing_pods:
        first = summary.failing_pods[0]
        return f"{message}{first.node}: {first.reason}: {first.message}"
    message += f"{summary.lacking} without a pod: see "
    message += f"'kubectl describe daemonset -n {namespace} {name}'"
    if not observed.pods:
        message += (
            "; if the namespace forbids privileged pods, run 'kubectl label --overwrite namespace "
            f"{namespace} pod-security.kubernetes.io/enforce=privileged'"
        )
    return message


def is_mixed(observed: Observed) -> bool:
    """Whether its pods are of several templates although they should not be."""
    return len(revisions_of(observed.pods)) > 1 and not observed.stamp.parked


def rolling_message(observed: Observed, summary: Summary) -> str:
    daemonset = observed.daemonset
    namespace, name = key_of(observed.schedext)
    message = f"ready on {summary.ready} of {summary.desired} nodes, updated on {summary.updated}"
    strategy = daemonset["spec"]["updateStrategy"]["type"]
    if summary.updated >= summary.desired and is_mixed(observed):
        message += "; waiting for the last old pods to go"
    elif summary.settling:
        message += f"; waiting for the pods to stay up for {settle_seconds(daemonset):.0f} s"
    elif strategy == "OnDelete" and summary.updated < counts_of(daemonset).current:
        message += "; updateStrategy is OnDelete: to replace the pods, run 'kubectl delete pod "
        message += f"-n {namespace} -l name={name},{SELECT_OURS}'"
    return message


def ready_reason(observed: Observed, summary: Summary) -> Problem:
    """Reason and message of the Ready condition if the DaemonSet is as it should be."""
    claim, winners, daemonset = claim_of(observed.schedext), observed.winners, observed.daemonset
    desired = summary.desired
    twin = twin_of(claim, winners)
    if twin and not claim.is_suspended:
        if twin.is_leaving:
            return "RollingOut", f"waiting for SchedExt {twin.name()} to be deleted"
        return "Conflict", conflict_message(twin)
    if not is_observed(daemonset):
        return "RollingOut", "waiting for the DaemonSet controller"
    if claim.is_suspended:
        if left := counts_of(daemonset).misscheduled:
            return "RollingOut", f"suspended; waiting for pods to end: {left}"
        return "Suspended", "runs on no node; set spec.suspend to false to resume"
    if not desired:
        return "NoNodes", no_nodes_message(claim, winners)
    if summary.failing:
        return "NodesFailing", failing_message(observed, summary)
    if summary.ready < desired or summary.updated < desired or is_mixed(observed):
        return "RollingOut", rolling_message(observed, summary)
    message = f"running on {desired} of {desired} nodes"
    if observed.stamp.parked:
        message += "; parked: only the choice of nodes has changed, so running pods were kept"
    return "AllReady", message


def condition(status: dict, kind: str) -> dict:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def build_status(observed: Observed, summary: Summary, blocked: Blocked | None, now: str) -> dict:
    """The status of a SchedExt."""
    old = observed.schedext["status"]
    generation = generation_of(observed.schedext)
    if blocked:
        reason, message = blocked.reason, str(blocked)
    else:
        reason, message = ready_reason(observed, summary)
    states = {"Ready": "True" if reason in ("AllReady", "Suspended") else "False"}
    if reason in STALLING:
        states["Stalled"] = "True"  # else GitOps tools would wait forever
    conditions = [c for c in old.get("conditions", ()) if c["type"] not in ("Ready", "Stalled")]
    for kind, state in states.items():
        before = condition(old, kind)
        is_same = before.get("status") == state
        conditions.append(
            {
                "type": kind,
                "status": state,
                "reason": reason,
                "message": message,
                "observedGeneration": generation,
                "lastTransitionTime": before.get("lastTransitionTime", now) if is_same else now,
            }
        )
    return {
        "observedGeneration": generation,
        "nodes": {
            field: getattr(summary, field) for field in ("desired", "ready", "updated", "failing")
        },
        "failures": [
            {"node": pod.node, "pod": pod.name, "reason": pod.reason, "message": pod.message}
            for pod in summary.failing_pods[:MAX_FAILURES]
        ],
        "conditions": conditions,
    }


def build_event(schedext: dict, kind: str, reason: str, message: str, now: str) -> dict:
    """An event that kubectl describe shows: a Warning, or a Normal one."""
    meta = schedext["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}."},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": "SchedExt",
            **{field: meta[field] for field in ("namespace", "name", "uid")},
        },
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "source": {"component": "sked"},
        "firstTimestamp": now,
        "lastTimestamp": now,
    }


# ---------------------------------------------------------------- metrics

METRICS_HELP = """\
controller_runtime_reconcile_total counter Passes over a SchedExt, by result.
controller_runtime_reconcile_time_seconds histogram Duration of such a pass.
rest_client_requests_total counter Requests to the API server, by HTTP status (0: no answer).
workqueue_depth gauge SchedExts waiting for a worker.
leader_election_master_status gauge 1 if this replica leads, 0 if it stands by.
sked_schedext_nodes gauge Nodes of each SchedExt that is not suspended, by state.
sked_schedext_status gauge 1 for the reason of each SchedExt's Ready condition.
sked_build_info gauge The version of sked.
"""
BUCKETS = (0.01, 0.1, 1.0, 10.0, "+Inf")  # seconds


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

# ---------------------------------------------------------------- the API server

SCHEDEXTS = "/apis/sked.schedkit.io/v1{}/schedexts"
DAEMONSETS = "/apis/apps/v1{}/daemonsets"
PODS = "/api/v1{}/pods"
EVENTS = "/api/v1{}/events"
LEASES = "/apis/coordination.k8s.io/v1{}/leases"

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 30.0  # for everything but a watch
WATCH_SECONDS = 240  # after this the API server ends a watch
CREDENTIAL_SECONDS = 1.0  # how long they are kept: asking the package takes a quarter of a request
POOL_CONNECTIONS = 12  # more than the threads that usually talk to the API server


def path_to(resource: str, namespace: str, *names: str) -> str:
    scope = f"/namespaces/{namespace}" if namespace else ""
    return "/".join([resource.format(scope), *names])


SETUP_OR_NETWORK_ERRORS = (
    urllib3.exceptions.HTTPError,
    OSError,
    ValueError,
    yaml.YAMLError,
    kubeconfig.ConfigException,
)


@contextmanager
def as_api_error() -> Iterator[None]:
    """Turns the errors of configuration, network and decoding into an ApiError."""
    try:
        yield
    except SETUP_OR_NETWORK_ERRORS as error:
        cause = " ".join(str(error).split())
        raise ApiError(0, f"cannot talk to the API server: {cause}") from error


def client_tls(configuration: Configuration) -> ssl.SSLContext:
    """One context for all connections. The package would load the certificates again for each of
    them, and Python crashes when several threads do that at once."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # it refuses some hosted clusters
    if not configuration.verify_ssl:
        context.check_hostname = False  # verify_mode is set by urllib3
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


@contextmanager
def package_errors() -> Iterator[list[str]]:
    """Collects what the kubernetes package would log in a with block.

    A credential plugin that fails raises nothing there: the package logs that, on the root logger,
    and goes on.
    """
    errors = []

    def keep(record: logging.LogRecord) -> bool:
        errors.append(record.getMessage())
        return False

    logging.root.addFilter(keep)
    try:
        yield errors
    finally:
        logging.root.removeFilter(keep)


class Api:
    """Plain dicts to and from the API server; a request that goes wrong is an ApiError."""

    def __init__(self, configure: Callable[[], Configuration]) -> None:
        self.configure = configure
        self.lock = threading.Lock()
        self.host = "an API server (not logged in yet)"
        with suppress(ApiError):  # configure() failed to log in; the next request tries again.
            self.connect()

    def connect(self) -> None:
        """Read the configuration, with its credentials and certificates, and start anew."""
        self.must_connect = True  # until all of this has succeeded
        self.headers_expire_at = 0.0
        configuration = self.configure()
        configuration.retries = False
        configuration.connection_pool_maxsize = POOL_CONNECTIONS
        configuration.socket_options = tcp_keepalive_socket_options(idle=30, interval=10, count=3)
        pools = RESTClientObject(configuration).pool_manager  # it knows about proxies
        pools.connection_pool_kw["ssl_context"] = client_tls(configuration)
        for option in ("ca_certs", "ca_cert_data", "cert_file", "key_file"):
            pools.connection_pool_kw.pop(option, None)  # else each connection loads them again
        self.pool = pools.connection_from_url(configuration.host)
        self.base = urllib3.util.parse_url(configuration.host).path or ""
        self.configuration = configuration
        self.host = configuration.host
        self.must_connect = False

    def renew_headers(self) -> None:
        """Ask the package for the credentials, which it renews when they are about to expire."""
        with package_errors() as errors:
            credentials = self.configuration.auth_settings().values()
        if errors:  # auth_settings() has run the credential plugin, which failed
            self.connect()  # fails with the name of the plugin, or has new credentials
            credentials = self.configuration.auth_settings().values()
        self.headers = {"User-Agent": f"{FIELD_MANAGER}/{__version__}"}
        self.headers |= {credential["key"]: credential["value"] for credential in credentials}
        self.headers_expire_at = monotonic() + CREDENTIAL_SECONDS

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
        """The JSON that the API server answers, within REQUEST_SECONDS by default."""
        response = self.send(method, path, body, timeout or REQUEST_SECONDS, query)
        with as_api_error(), closing(response):
            return json.loads(response.data)

    def watch(self, path: str, **query: Any) -> Iterator[dict]:
        """Open a watch. Returns its events; errors in reading and decoding them are ApiErrors."""
        query |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": WATCH_SECONDS}
        response = self.send("GET", path, None, WATCH_SECONDS + REQUEST_SECONDS, query)
        return self.events(response)

    def events(self, response: urllib3.BaseHTTPResponse) -> Iterator[dict]:
        with as_api_error(), closing(response):
            for line in response:
                yield json.loads(line)

    def send(
        self, method: str, path: str, body: dict | None, timeout: float, query: dict
    ) -> urllib3.BaseHTTPResponse:
        """The response to a successful request, whose body has not been read yet."""
        with as_api_error():
            with self.lock:  # so that a plugin that renews the credentials runs once
                if self.must_connect:
                    self.connect()
                if monotonic() > self.headers_expire_at:
                    self.renew_headers()
                pool, base, headers = self.pool, self.base, self.headers.copy()
            kind = "merge-patch+json" if method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
            try:
                response = pool.urlopen(
                    method,
                    f"{base}{path}?{urlencode(query)}",
                    body=json.dumps(body) if body else None,
                    headers=headers,
                    timeout=urllib3.Timeout(connect=min(CONNECT_SECONDS, timeout), read=timeout),
                    redirect=False,
                    preload_content=False,
                )
            except Exception as error:
                METRICS.requested(method, 0)
                if isinstance(error, urllib3.exceptions.SSLError):
                    self.must_connect = True  # perhaps the certificates are out of date
                raise
            METRICS.requested(method, response.status)
            if response.status < 300:
                return response
            with closing(response):
                raise self.refusal(response)

    def refusal(self, response: urllib3.BaseHTTPResponse) -> ApiError:
        text = response.data.decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["message"]
        if response.status == 401:
            self.must_connect = True
            text += ": the token or certificate is wrong or has expired; log in again"
        return ApiError(response.status, text or f"HTTP status {response.status}")


# ---------------------------------------------------------------- watching

PAGE_ITEMS = 100  # in each page of a list
RECONNECT_SECONDS = 8.0  # the longest wait between attempts to reach an API server that is down


class Reflector:
    """A cache of one resource, by key, that follows the API server.

    Each subclass has a RESOURCE and a method changed(old, new), which queues the keys that a change
    concerns. None stands for an object that does not exist.
    """

    QUERY = {"labelSelector": SELECT_OURS}

    def __init__(self, operator: Operator, namespace: str) -> None:
        self.operator = operator
        self.path = path_to(self.RESOURCE, namespace)
        self.name = self.path.rpartition("/")[2]
        self.objects = {}  # what is kept of each, by key
        self.filled = threading.Event()

    def keep(self, obj: dict) -> Any:
        """What the cache keeps of an object."""
        return trimmed(obj)

    def values(self) -> list:
        """A snapshot of the cache."""
        return list(self.objects.values())

    def run(self) -> None:
        version = ""  # to watch from; empty: list first
        short_watches = 0  # in a row
        while not self.operator.stop.is_set():
            started = monotonic()
            resume_at = version
            version = ""  # it stays empty if there is an error
            try:
                version = self.watch_from(resume_at or self.list_all())
            except ApiError as error:
                # 404, 410: the watch cannot go on. No fault: the next list says if there is one.
                if error.status not in (404, 410):
                    self.operator.faults.report(self.name, str(error))
            except Exception:
                log.exception("%s: unexpected error in the watch loop", self.name)
            if monotonic() > started + RECONNECT_SECONDS:
                short_watches = 0
                continue  # resume at once
            # A watch that did not last counts as a failure: some proxies end each watch at once.
            short_watches += 1
            self.operator.stop.wait(backoff(short_watches, RECONNECT_SECONDS))

    def list_all(self) -> str:
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
                self.store({key: None for key in self.objects})  # without the CRD there are none
                raise ApiError(
                    0,
                    f"the API server has no {self.name}: "
                    "install the CRD with 'kubectl apply -f install.yaml'",
                ) from None
            for obj in page.get("items") or ():
                items[key_of(obj)] = self.keep(obj)
            more = query["continue"] = page["metadata"].get("continue")
        deleted = {key: None for key in self.objects.keys() - items.keys()}
        self.store(items | deleted)
        self.filled.set()
        return page["metadata"]["resourceVersion"]

    def watch_from(self, version: str) -> str:
        """Watch from a version on. Returns the last version seen, where the next watch resumes.

        No event at all, not even a bookmark, may mean that the server was restored from a backup,
        and has not reached this version again. Then this returns "", so that run() lists.
        """
        last = ""
        events = self.operator.api.watch(self.path, **self.QUERY, resourceVersion=version)
        with closing(events):
            self.operator.faults.clear(self.name)
            self.operator.beat()
            for event in events:
                self.operator.beat()
                kind, obj = event["type"], event["object"]
                if kind == "ERROR":
                    raise ApiError(obj["code"], obj["message"])
                if kind != "BOOKMARK":
                    self.store({key_of(obj): None if kind == "DELETED" else self.keep(obj)})
                last = obj["metadata"]["resourceVersion"]
        return last

    def store(self, items: dict) -> None:
        """Keep all of them (None: deleted), then queue what changed."""
        changes = [(self.objects.get(key), item) for key, item in items.items()]
        for key, item in items.items():
            if item:
                self.objects[key] = item
            else:
                self.objects.pop(key, None)
        for old, new in changes:
            if old != new:
                self.changed(old, new)


def trimmed(obj: dict) -> dict:
    """An object without what sked does not need."""
    for entry in obj["metadata"].get("managedFields", ()):
        entry.pop("fieldsV1", None)  # its largest part
    obj.pop("apiVersion", None)  # a watch has these two, a list does not, and we know them
    obj.pop("kind", None)
    for part in ("spec", "status"):
        if not isinstance(obj.get(part), dict):  # a lax CRD may allow anything
            obj[part] = {}
    return obj


class SchedExts(Reflector):
    RESOURCE = SCHEDEXTS
    QUERY = {}

    def __init__(self, operator: Operator, namespace: str) -> None:
        super().__init__(operator, namespace)
        self.claims = {}  # by key; a pass looks at all of them, so they are kept apart

    def changed(self, old: dict | None, new: dict | None) -> None:
        """Queue the SchedExt and, if its claim to nodes is new or gone, those that yield to it."""
        key = key_of(new or old)
        is_same_spec = old and new and generation_of(old) == generation_of(new)
        self.operator.queue.add(key, GATHER_SECONDS if is_same_spec else 0.0)
        old_claim = self.claims.get(key)
        claim = claim_of(new) if new else None
        if claim:
            self.claims[key] = claim
        else:
            self.claims.pop(key, None)
        if claim == old_claim or not self.filled.is_set():
            return  # the first list queues every SchedExt
        # Others leave the nodes of a new winner at once, and its pods start there at the same time,
        # so they may fail for some seconds. Others return to the nodes of a deleted one a moment
        # later, when its pods have begun to end.
        delay = 0.0 if new else GATHER_SECONDS
        for claimant in filter(None, (old_claim, claim)):
            for rival in claimant.rivals(list(self.claims.values())):
                if rival.rank > claimant.rank:
                    self.operator.queue.add(rival.key, delay)


class DaemonSets(Reflector):
    RESOURCE = DAEMONSETS

    def changed(self, old: dict | None, new: dict | None) -> None:
        """Queue its SchedExt, at once if someone else has edited the DaemonSet. The rest can wait.

        A deletion waits, too: the news that the SchedExt is deleted as well may come later.
        """
        same_spec = not (old and new) or generation_of(old) == generation_of(new)
        is_edit = not same_spec and stamp_of(new).generation != generation_of(new)
        self.operator.queue.add(key_of(new or old), 0.0 if is_edit else GATHER_SECONDS)


class Pods(Reflector):
    RESOURCE = PODS

    def keep(self, obj: dict) -> Pod | None:
        """None if the pod is on its way out: it may run for a while, but no longer counts."""
        if "deletionTimestamp" in obj["metadata"]:
            return None
        old = self.objects.get(key_of(obj))
        try:
            return read_pod(obj, old, monotonic())
        except Exception:  # a pod that we cannot read must not stop the others
            log.exception("%s/%s: unexpected error in reading this pod", *key_of(obj))
            return old

    def changed(self, old: Pod | None, new: Pod | None) -> None:
        self.operator.queue.add((new or old).key, GATHER_SECONDS)


# ---------------------------------------------------------------- the queue

RETRY_SECONDS = 300.0  # the longest wait before retrying what fails, or what others keep undoing
BEAT_SECONDS = 30.0  # a worker without work shows a sign of life this often


class WorkQueue:
    """Keys to work on. A key is queued at most once, and only one worker has it at a time."""

    def __init__(self) -> None:
        self.due = {}  # when, by key
        self.busy = set()
        self.failures = {}  # by key: their kind, and how many in a row
        self.closed = False
        self.condition = threading.Condition()  # its lock is re-entrant

    def add(self, key: Key, after: float = 0.0) -> None:
        """Work on a key after this many seconds (inf: never), or sooner if it is due sooner."""
        with self.condition:
            when = monotonic() + after
            if when < self.due.get(key, inf) and not self.closed:
                self.due[key] = when
                self.condition.notify()

    def get(self, beat: Callable[[], None]) -> Key | None:
        """Wait for a key that is due; None once the queue is closed. Calls beat now and then."""
        with self.condition:
            while not self.closed:
                beat()
                key, wait = self.next()
                if wait <= 0:
                    del self.due[key]
                    self.busy.add(key)
                    self.condition.notify()  # wake another worker to wait for the next key
                    return key
                self.condition.wait(min(wait, BEAT_SECONDS))
        return None

    def next(self) -> tuple[Key | None, float]:
        """The key that is due next, and in how many seconds: inf if there is none."""
        key = min(self.due.keys() - self.busy, key=self.due.get, default=None)
        return key, self.due.get(key, inf) - monotonic()

    def succeeded(self, key: Key, look_again: float) -> None:
        self.failures.pop(key, None)
        self.done(key, look_again)

    def failed(self, key: Key, kind: str, longest_wait: float, at_once: bool = False) -> int:
        """Work on the key again with back-off; at_once: the first retry does not wait.

        Returns how often it has failed in a row. Another kind of failure starts afresh.
        """
        last_kind, failures = self.failures.get(key, (kind, 0))
        failures = failures + 1 if kind == last_kind else 1
        self.failures[key] = kind, failures
        is_first = failures == 1
        self.done(key, 0.0 if at_once and is_first else backoff(failures, longest_wait))
        return failures

    def done(self, key: Key, look_again: float) -> None:
        with self.condition:
            self.busy.remove(key)
            self.add(key, look_again)
            self.condition.notify()  # the key may be due again, or close() may be waiting

    def has_failed(self, key: Key) -> bool:
        return key in self.failures

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


# ---------------------------------------------------------------- what the process remembers

QUICK_REPAIRS = 6  # made at once; after that it is a fight, and sked pauses between repairs
QUIET_SECONDS = 60.0  # after this long without a repair, a fight is over
PATIENCE_SECONDS = 10.0  # a refusal that has lasted this long belongs in the status


class Memory:
    """What sked remembers of one SchedExt. The stamp and the status hold what a restart needs."""

    def __init__(self, schedext: dict) -> None:
        self.schedext_uid = schedext["metadata"]["uid"]
        # The DaemonSet, as we last wrote it or found it as it should be:
        self.daemonset_uid = ""
        self.stamp = NO_STAMP
        self.stamp_sticks = True  # False if something strips the stamp from what we write
        # Trouble with writing it, by monotonic():
        self.refused_since: float | None = None
        self.repairs = 0  # of what others changed, in a row
        self.paused_until = 0.0  # no repair before this
        self.pause_message = ""
        # The status:
        self.next_status = 0.0  # the earliest time for another write of it
        self.counts: tuple | None = None  # of the DaemonSet, as last seen
        self.counts_since = 0.0
        ready = condition(schedext["status"], "Ready")  # sked may have restarted
        self.was_failing = ready.get("reason") == "NodesFailing"
        self.last_warning = ready["message"] if ready.get("reason") in WARNINGS else ""

    def wrote_daemonset(self, answer: dict, stamp: Stamp) -> None:
        """Note the API server's answer to a write of the DaemonSet with this stamp."""
        self.next_status = monotonic() + GATHER_SECONDS
        self.stamp_sticks = stamp_of(answer) == stamp
        self.saw_as_wanted(with_stamp(answer, stamp))

    def saw_as_wanted(self, daemonset: dict) -> None:
        """Note a DaemonSet that is as sked wants it."""
        self.daemonset_uid = daemonset["metadata"]["uid"]
        self.stamp = stamp_of(daemonset)._replace(generation=generation_of(daemonset))
        self.refused_since = None

    def is_ahead_of(self, daemonset: dict) -> bool:
        """Whether this copy of the DaemonSet may be older than our last write."""
        if daemonset["metadata"]["uid"] != self.daemonset_uid:
            return False
        if self.stamp_sticks:
            return stamp_of(daemonset) != self.stamp
        return generation_of(daemonset) < self.stamp.generation

    def stamp_to_trust(self, daemonset: dict) -> Stamp:
        """The stamp on the DaemonSet, unless someone has removed or copied it."""
        there = stamp_of(daemonset)
        if daemonset["metadata"]["uid"] != self.daemonset_uid:
            return NO_STAMP if is_never_written(daemonset) else there
        # One that differs from ours only in its generation is ours: we know the true one. Another
        # later one is of another sked, or of our own earlier write if the last has never arrived.
        is_ours = there._replace(generation=self.stamp.generation) == self.stamp
        is_later = there.generation > self.stamp.generation
        return there if is_later and not is_ours else self.stamp

    def refused(self) -> float:
        """Note a refusal. Returns for how many seconds it has lasted."""
        now = monotonic()
        if self.refused_since is None:
            self.refused_since = now
        return now - self.refused_since

    def count_repair(self, drift: str) -> int:
        """Note what our last write undid; empty if it was nothing that sked owns.

        Another controller, webhook or script may keep setting another value. sked never gives up,
        but after some quick repairs it waits longer and longer, until no repair has been needed for
        a minute, or something new has been written. Returns the number of such slow repairs.
        """
        if monotonic() > self.paused_until + QUIET_SECONDS:
            self.repairs = 0
        self.repairs += 1
        slow_repairs = max(0, self.repairs - QUICK_REPAIRS)
        pause = backoff(slow_repairs, RETRY_SECONDS) if slow_repairs else 0.0
        self.paused_until = monotonic() + pause
        self.pause_message = (
            "the DaemonSet is being changed again and again, and sked is backing off; the last "
            f"time, {drift or 'the change was to fields that sked does not own'}"
        )
        return slow_repairs

    def wrote_something_new(self) -> None:
        self.repairs = 0
        self.paused_until = 0.0

    def is_fighting(self) -> bool:
        """Whether others keep changing the DaemonSet, and sked is backing off."""
        return monotonic() < self.paused_until

    def check_pause(self, wish: str) -> None:
        """Raise Blocked if it is too soon to repair the DaemonSet again. What is new can't wait."""
        wait = self.paused_until - monotonic()
        if wish == self.stamp.wish and wait > 0:
            raise Blocked("RollingOut", self.pause_message, wait)

    def note_counts(self, counts: tuple) -> float:
        """Note the counts. Returns for how many seconds they have been the same.

        If the status says NodesFailing when sked starts, they count as old enough: a restart of
        sked does not hide a failure for 10 s.
        """
        now = monotonic()
        if counts != self.counts:
            has_lasted = self.counts is None and self.was_failing
            self.counts = counts
            self.counts_since = now - SETTLE_SECONDS if has_lasted else now
        return now - self.counts_since


# ---------------------------------------------------------------- reconcile

WORKERS = 3  # enough to hide the latency of the API server; a fourth costs more than it brings
QUIET_FAILURES = 4  # failures of a key in a row that may pass by themselves; the next one is logged
STUCK_SECONDS = 360.0  # a thread that shows no sign of life for this long is stuck
STOP_SECONDS = 1.8  # the most from SIGTERM to exit
FINISH_SECONDS = 0.8  # of that, for the work under way
RELEASE_SECONDS = 0.6  # of that, for handing over the lease
EVENT_SECONDS = 0.9  # for sending an event, so that one that hangs does not delay the status


class Faults:
    """Current trouble with the API server, by reflector, key or lease."""

    def __init__(self) -> None:
        self.messages = {}
        self.lock = threading.Lock()

    def report(self, who: str, message: str) -> None:
        """Log a fault, unless one that begins alike is known: an outage has many messages."""
        with self.lock:
            known = {other.partition(":")[0] for other in self.messages.values()}
            if message.partition(":")[0] not in known:
                log.warning("%s; trying again", message)
            self.messages[who] = message

    def clear(self, who: str) -> None:
        """Note that a request has succeeded, and log it if that was the last fault."""
        with self.lock:
            if self.messages.pop(who, None) and not self.messages:
                log.info("requests to the API server succeed again")


class Operator:
    """The caches, the queue, and the work on one key."""

    def __init__(self, api: Api, namespace: str = "", elector: Elector | None = None) -> None:
        self.api = api
        self.elector = elector
        self.stop = threading.Event()
        self.queue = WorkQueue()
        self.memories = {}  # by key
        self.beats = {}  # the last sign of life, by thread
        self.faults = Faults()
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

    def silent_threads(self) -> list[str]:
        oldest = monotonic() - STUCK_SECONDS
        beats = self.beats.copy()
        return sorted(t.name for t in beats if beats[t] < oldest or not t.is_alive())

    def work(self) -> None:
        while not self.is_ready() and not self.stop.is_set():
            for reflector in self.reflectors:
                reflector.filled.wait(1.0)
        while key := self.queue.get(self.beat):
            self.process(key)

    def process(self, key: Key) -> None:
        """Reconcile a key and queue it again. All errors end here."""
        started = monotonic()
        who = "/".join(key)
        result = "error"
        try:
            look_again = self.reconcile(key)
        except ApiError as error:
            if error.is_outage():
                self.faults.report(who, str(error))  # logged once, however many keys it affects
                if memory := self.memories.get(key):
                    memory.refused_since = None  # an outage ends a run of refusals
                self.queue.failed(key, "outage", RECONNECT_SECONDS)
            else:
                is_cache_behind = error.status in (404, 409)
                result = "requeue" if is_cache_behind else "error"
                times = self.queue.failed(key, "refusal", BLOCKED_SECONDS, at_once=is_cache_behind)
                if times > QUIET_FAILURES:
                    self.faults.report(who, f"{who}: {error}")
        except Exception:
            log.exception("%s: unexpected error", who)
            self.queue.failed(key, "bug", RETRY_SECONDS)
        else:
            result = "success"
            self.faults.clear(who)
            self.queue.succeeded(key, look_again)
        METRICS.reconciled(result, monotonic() - started)

    def reconcile(self, key: Key) -> float:
        """Make the DaemonSet and the status of one SchedExt what they should be.

        A pass writes the DaemonSet and its stamp, or the status. Returns the seconds until another
        look is due.
        """
        schedext = self.schedexts.objects.get(key)
        if not schedext or "deletionTimestamp" in schedext["metadata"]:
            # There is no finalizer: the owner reference makes the garbage collector clean up.
            if self.memories.pop(key, None):
                log.info("%s/%s: deleted", *key)
            return inf
        uid = schedext["metadata"]["uid"]
        if key not in self.memories or self.memories[key].schedext_uid != uid:
            self.memories[key] = Memory(schedext)
        observed = self.observe(key, schedext)
        blocked = None
        try:
            target = plan(observed)
            if target:
                self.write_daemonset(key, observed, target)
                return GATHER_SECONDS  # the status follows, once the controller has reacted
            self.memories[key].saw_as_wanted(observed.daemonset)
        except InvalidSpec as error:
            blocked = Blocked("Rejected", str(error), look_again=inf)  # until a SchedExt changes
        except Blocked as error:
            blocked = error
        return self.update_status(key, observed, blocked)

    def observe(self, key: Key, schedext: dict) -> Observed:
        """Gather what plan and the status need."""
        memory = self.memories[key]
        daemonset = self.find_daemonset(key, schedext)
        stamp, pods = NO_STAMP, []
        if daemonset:
            stamp = memory.stamp_to_trust(daemonset)
            if not memory.stamp_sticks:  # Pretend that it did, or plan would write it forever.
                daemonset = with_stamp(daemonset, stamp)
            uid = daemonset["metadata"]["uid"]
            pods = [pod for pod in self.pods.values() if pod.daemonset_uid == uid]
        winners = claim_of(schedext).winners(list(self.schedexts.claims.values()))
        return Observed(schedext, daemonset, stamp, pods, winners, memory.is_fighting())

    def find_daemonset(self, key: Key, schedext: dict) -> dict | None:
        """The DaemonSet, or None.

        Usually the cache knows. sked asks the API server after a failure, when the cache is older
        than its own last write, when a DaemonSet that it made is missing (which may only have lost
        its label), and when one has no owner. Before it then creates or adopts one, it makes sure
        that the SchedExt still exists: its deletion may not have reached the watch.
        """
        memory = self.memories[key]
        found = self.daemonsets.objects.get(key)
        if found:
            is_doubtful = not controller_of(found) or memory.is_ahead_of(found)
        else:
            is_doubtful = bool(schedext["status"] or memory.daemonset_uid)  # sked may have made one
        if not is_doubtful and not self.queue.has_failed(key):
            return found
        found = self.api.get(path_to(DAEMONSETS, *key))
        if not found or not controller_of(found):
            self.check_existence(key, schedext)
        return trimmed(found) if found else None

    def check_existence(self, key: Key, schedext: dict) -> None:
        """Raise an ApiError if the SchedExt has been deleted, or is another one by now."""
        found = self.api.get(path_to(SCHEDEXTS, *key))
        there = found["metadata"] if found else {}
        if there.get("uid") != schedext["metadata"]["uid"] or "deletionTimestamp" in there:
            raise ApiError(409, "the SchedExt is gone, but the watch has not said so yet")

    def write_daemonset(self, key: Key, observed: Observed, target: dict) -> None:
        """Create or patch the DaemonSet as planned, and report it.

        Raises Blocked if it is too soon, or if a refusal belongs in the status.
        """
        have, stamp, memory = observed.daemonset, stamp_of(target), self.memories[key]
        memory.check_pause(stamp.wish)
        had_one = bool(
            memory.daemonset_uid or observed.schedext["status"].get("nodes", {}).get("desired")
        )
        try:
            if have:
                answer = self.patch(path_to(DAEMONSETS, *key), have, target)
            else:
                answer = trimmed(self.write("POST", path_to(DAEMONSETS, key[0]), target))
        except ApiError as error:
            if error.is_outage():
                # If the write has arrived, plan will take it for an edit and write again.
                memory.stamp = stamp._replace(generation=0)
            self.check_refusal(key, error)
            raise
        used_to_stick = memory.stamp_sticks
        memory.wrote_daemonset(answer, stamp)
        if used_to_stick and not memory.stamp_sticks:
            log.warning(
                "%s/%s: something removes the annotation %s; sked remembers it until it restarts",
                *key,
                STAMP,
            )
        is_a_repair = is_repair(have, observed.stamp, stamp) if have else had_one
        self.report_write(key, observed, answer, is_a_repair)
        if memory.stamp != stamp:  # plan guessed another generation
            # Without a resourceVersion: it is true of our write whatever has happened since.
            metadata = {"uid": memory.daemonset_uid, "annotations": {STAMP: memory.stamp.text()}}
            self.write("PATCH", path_to(DAEMONSETS, *key), {"metadata": metadata})

    def check_refusal(self, key: Key, error: ApiError) -> None:
        """Raise Blocked if a refusal of the DaemonSet belongs in the status.

        Not if it says nothing about the DaemonSet: the API server is down or busy, a cache is
        behind, or the namespace is being deleted and its SchedExts are about to go. A 400 or 422
        belongs there at once; others, such as a 403 while a role is being bound, if they last.
        """
        is_ending = "is being terminated" in str(error)
        if error.is_outage() or error.status in (404, 409, 429) or is_ending:
            return
        lasted = self.memories[key].refused()
        if lasted >= PATIENCE_SECONDS or error.status in (400, 422):
            message = f"cannot apply the DaemonSet: {str(error)[:1000]}"
            next_try = max(GATHER_SECONDS, min(lasted, BLOCKED_SECONDS))
            raise Blocked("Rejected", message, next_try) from error

    def report_write(self, key: Key, observed: Observed, answer: dict, is_a_repair: bool) -> None:
        """Log a write of the DaemonSet. If it repairs what others did, send an event."""
        have, memory = observed.daemonset, self.memories[key]
        changes = changed_fields(have, answer) if have else []
        drift, slow_repairs = "", 0
        if is_a_repair:
            drift = drift_message(observed, changes, memory.stamp.parked)
            slow_repairs = memory.count_repair(drift)
        else:
            memory.wrote_something_new()
        if not drift:
            action = f"changed {listed(changes)} of" if changes else "stamped"
            log.info("%s/%s: %s the DaemonSet", *key, action if have else "created")
            return
        if slow_repairs > 1:
            return  # the status tells about the fight
        if slow_repairs == 1:
            drift += f" {memory.repairs} times and is backing off"
        log.warning("%s/%s: %s", *key, drift)
        self.send_event(observed.schedext, "Warning", "DriftUndone", drift)

    def update_status(self, key: Key, observed: Observed, blocked: Blocked | None) -> float:
        """Write the status if it differs. Returns the seconds until another look is due."""
        schedext, daemonset, memory = observed.schedext, observed.daemonset, self.memories[key]
        counts = counts_of(daemonset)[:3] if daemonset else ()  # desired, current and updated
        unchanged_for = memory.note_counts(counts)
        summary = summarize(observed, unchanged_for, monotonic())
        status = build_status(observed, summary, blocked, timestamp())
        if status != schedext["status"]:
            wait = memory.next_status - monotonic()
            if wait > 0:
                return wait  # so that a rollout does not write the status for every pod
            path = path_to(SCHEDEXTS, *key, "status")
            self.patch(path, schedext, schedext | {"status": status})
            memory.next_status = monotonic() + GATHER_SECONDS
            self.report_status(key, schedext, status)
        wait = next_change_in(summary, unchanged_for, blocked)
        return max(GATHER_SECONDS, wait)  # no busy loop

    def report_status(self, key: Key, schedext: dict, status: dict) -> None:
        """Log a new reason, and send an event if someone should be told something new."""
        memory = self.memories[key]
        new = condition(status, "Ready")
        reason, message = new["reason"], new["message"]
        if reason == condition(schedext["status"], "Ready").get("reason"):
            return
        level = logging.WARNING if reason in WARNINGS else logging.INFO
        log.log(level, "%s/%s: %s: %s", *key, reason, message)
        if reason in WARNINGS:
            if message != memory.last_warning:
                self.send_event(schedext, "Warning", reason, message)
            memory.last_warning = message
        elif new["status"] == "True":
            if reason == "AllReady" and memory.last_warning:
                self.send_event(schedext, "Normal", reason, message)
            memory.last_warning = ""

    def send_event(self, schedext: dict, kind: str, reason: str, message: str) -> None:
        """Send an event. If that fails, nothing is lost: the log and the status say the same."""
        path = path_to(EVENTS, schedext["metadata"]["namespace"])
        event = build_event(schedext, kind, reason, message, timestamp())
        with suppress(ApiError):
            self.write("POST", path, event, EVENT_SECONDS)

    def patch(self, path: str, before: dict, after: dict) -> dict:
        """The object, patched. The API server answers 409 if anything has changed it since."""
        patch = merge_patch(before, after)
        meta = patch.setdefault("metadata", {})
        meta["resourceVersion"] = before["metadata"]["resourceVersion"]
        return trimmed(self.write("PATCH", path, patch))

    def write(self, method: str, path: str, body: dict, timeout: float | None = None) -> dict:
        """The answer to a write. A leader that has lost its lease exits instead."""
        if self.elector:
            self.elector.exit_if_lost()
        # Skipping field validation spares the API server a second decoding.
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Ignore"}
        return self.api.request(method, path, body, timeout, **query)


def spawn(run: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


# ---------------------------------------------------------------- the lease

LEASE_NAME = "b4c95cb3.schedkit.io"  # the Go operator's, so that the two never act at once
LEASE_SECONDS = 15
RENEW_SECONDS = 2.0
RENEW_REQUEST_SECONDS = 4.0
RENEW_DEADLINE_SECONDS = 10.0  # a leader that has not renewed for this long exits


class Elector:
    """Holds the Lease, or waits for it.

    The Lease of another replica has expired when it has not changed for its duration, by our clock.
    """

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.path = path_to(LEASES, namespace, LEASE_NAME)
        self.identity = f"{socket.gethostname()}_{uuid.uuid4()}"
        self.lease = self.no_lease = {"metadata": {"name": LEASE_NAME, "namespace": namespace}}
        self.is_current = False  # whether it is as our last PUT left it: a renewal needs no GET
        self.observed_at = 0.0  # when the lease was seen to change
        self.renewed_at: float | None = None  # when we sent the last PUT that succeeded
        self.has_led = False

    def leads(self) -> bool:
        renewed_at = self.renewed_at  # read once: another thread may change it
        return renewed_at is not None and monotonic() < renewed_at + RENEW_DEADLINE_SECONDS

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
                operator.faults.clear("lease")
            except ApiError as error:
                self.is_current = False
                if error.status != 409:  # 409: another replica was faster
                    operator.faults.report("lease", str(error))
            self.exit_if_lost()
            if self.leads() and not self.has_led:
                self.has_led = True
                log.info("leading")
                operator.start()
            operator.stop.wait(RENEW_SECONDS)
        if operator.queue.close(FINISH_SECONDS) and self.leads():
            spec = self.lease["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1}
            with suppress(ApiError):
                self.put(spec, RELEASE_SECONDS)

    def take(self) -> None:
        """Take or renew the lease if it is free or ours."""
        if not self.is_current or not self.leads():
            lease = self.api.get(self.path, timeout=RENEW_REQUEST_SECONDS) or self.no_lease
            if lease != self.lease:
                self.lease = lease
                self.observed_at = monotonic()
        sent_at = monotonic()
        now = timestamp("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = self.lease.get("spec") or {}
        holder = spec.get("holderIdentity")
        if holder != self.identity:
            expires_at = self.observed_at + spec.get("leaseDurationSeconds", LEASE_SECONDS)
            if holder and sent_at < expires_at:
                self.renewed_at = None
                return  # another replica leads
            transitions = spec.get("leaseTransitions", -1) + 1
            spec = spec | {"acquireTime": now, "leaseTransitions": transitions}
        ours = {"holderIdentity": self.identity, "leaseDurationSeconds": LEASE_SECONDS}
        self.put(spec | ours | {"renewTime": now}, RENEW_REQUEST_SECONDS)
        self.is_current = True
        self.renewed_at = sent_at

    def put(self, spec: dict, timeout: float) -> None:
        """PUT also creates the Lease. If there is one, its resourceVersion makes the PUT fail when
        another replica was faster."""
        self.lease = self.api.request("PUT", self.path, self.lease | {"spec": spec}, timeout)


# ---------------------------------------------------------------- health and metrics pages

Page = tuple[int, str]  # HTTP status and text


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
    for schedext in operator.schedexts.values():
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
            header = self.headers.get("Authorization", "")
            try:
                status = review(server.operator.api, header, minute=int(monotonic() // 60))
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
        super().__init__((host.strip("[]"), int(port)), Handler)
        spawn(self.serve_forever, address)

    def get_request(self) -> tuple:
        connection, address = super().get_request()
        if self.certificate:  # loaded again: it may have been renewed
            tls = server_tls(self.certificate)
            connection = tls.wrap_socket(connection, True, do_handshake_on_connect=False)
        return connection, address

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


def load_configuration(path: str | None, context: str | None) -> Configuration:
    """The flag, else $KUBECONFIG, else the pod's own (unless --context), else ~/.kube/config."""
    configuration = Configuration()
    path = path or os.environ.get("KUBECONFIG")
    if not (path or context) and "KUBERNETES_SERVICE_HOST" in os.environ:
        kubeconfig.load_incluster_config(configuration)
        return configuration
    path = path or "~/.kube/config"
    try:
        merger = KubeConfigMerger(path)
        if not merger.config:
            raise ValueError("there is no such file")
        # As for kubectl, the first file that has a current-context decides.
        contexts = [file.get("current-context") for file in merger.config_files.values()]
        context = context or next(filter(None, contexts), None)
        loader = KubeConfigLoader(merger.config, context, config_base_path=None)
        with package_errors() as errors:
            loader.load_and_set(configuration)
    except Exception as error:  # the package raises anything if a file is no kubeconfig
        hint = "choose another one with --kubeconfig, $KUBECONFIG or --context"
        raise ValueError(f"cannot use the kubeconfig {path}: {error}; {hint}") from None
    if errors:
        name = loader.current_context["context"]["user"]
        user = merger.config["users"].get_with_name(name)["user"].value
        plugin = (user.get("exec") or {}).get("command", name)
        raise ApiError(0, f"the kubeconfig's credential plugin {plugin!r} failed: {errors[0]}")
    return configuration


def render(file: str) -> str:
    """The DaemonSets of the SchedExts in a YAML file (-: stdin), as YAML."""
    source = "stdin" if file == "-" else file
    try:
        with open(0 if file == "-" else file, "rb") as stream:
            documents = list(yaml.safe_load_all(stream.read()))
    except OSError as error:
        raise OSError(f"cannot read {source}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{source} is not valid YAML: {error}") from None
    objects = [obj for obj in documents if isinstance(obj, dict)]
    for obj in list(objects):
        if isinstance(obj.get("items"), list):
            objects += [item for item in obj["items"] if isinstance(item, dict)]
    schedexts = [obj for obj in objects if obj.get("kind") == "SchedExt"]
    if not schedexts:
        raise ValueError(f"{source} has no object of kind SchedExt")
    daemonsets = []
    for schedext in schedexts:
        try:
            daemonsets.append(build_daemonset(schedext, schedexts))
        except (ValueError, TypeError) as error:  # TypeError: a date cannot be a key in JSON
            name = key_of(schedext)[1] or "?"
            raise ValueError(f"{source}: SchedExt {name}: {error}") from None
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


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "sked", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    flag = parser.add_argument
    switch = {"nargs": "?", "const": True, "type": go_bool, "metavar": "BOOL"}
    address = {"type": go_address, "metavar": "ADDRESS"}
    flag("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, the pod's own, ~/.kube/config")
    flag("--context", help="use this context of the kubeconfig")
    flag("--namespace", default="", help="watch this namespace only")
    flag("--render", metavar="FILE", help="print the SchedExts in FILE as DaemonSets (-: stdin)")
    flag("--leader-elect", default=False, help="work only while holding the lease", **switch)
    flag("--leader-election-namespace", metavar="NAMESPACE", help="default: the pod's own")
    flag("--health-probe-bind-address", default=":8081", help="default: :8081; 0: none", **address)
    flag("--metrics-bind-address", default="0", help="default: 0, which is none", **address)
    flag("--metrics-secure", default=True, help="HTTPS, for authorized callers only", **switch)
    flag("--metrics-cert-dir", metavar="DIR", help="has tls.crt, tls.key (default: self-signed)")
    levels = ("debug", "info", "warning", "error")
    flag("--log-level", default="info", type=str.lower, choices=levels, help="default: info")
    # The Go operator's, without effect: our log has one form, and we speak HTTP/1.1.
    zap = "zap-devel zap-encoder zap-log-level zap-stacktrace-level zap-time-encoding"
    for name in ("enable-http2", *zap.split()):
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


def serve(args: argparse.Namespace, operator: Operator) -> None:
    """Start the HTTP servers that are asked for."""
    health = {"/healthz": healthz, "/readyz": readyz}
    certificate = ""
    if args.metrics_secure and args.metrics_bind_address != "0":
        certificate = args.metrics_cert_dir or self_signed()
        server_tls(certificate)  # so that a bad one shows at the start
    for flag, address, pages, server_certificate in (
        ("--health-probe-bind-address", args.health_probe_bind_address, health, ""),
        ("--metrics-bind-address", args.metrics_bind_address, {"/metrics": metrics}, certificate),
    ):
        if address == "0":
            continue
        try:
            Server(address, operator, pages, server_certificate)
        except OSError as error:
            problem = f"cannot listen on {address}: {error.strerror}"
            raise OSError(f"{problem}; choose another address with {flag}, or 0") from None


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
    where = args.namespace or "all namespaces"
    log.info("sked %s watches SchedExts in %s at %s", __version__, where, api.host)
    runner = spawn(functools.partial(elector.run, operator) if elector else operator.run, "runner")
    signal.sigwait(signals)
    operator.stop.set()
    runner.join(STOP_SECONDS)
    log.info("stopped")


def main(argv: list[str] | None = None) -> str | None:
    """Returns what went wrong, in one line."""
    args = parse(argv)
    logging.Formatter.converter = time.gmtime
    urllib3.disable_warnings()  # about a kubeconfig with insecure-skip-tls-verify
    try:
        logging.basicConfig(
            level=args.log_level.upper(),
            format="%(asctime)sZ %(levelname)-7s %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )
        if args.render:
            print(render(args.render), end="")
        else:
            run(args)
    except KeyboardInterrupt:
        return "sked: interrupted"
    except SETUP_OR_NETWORK_ERRORS as error:
        return f"sked: {' '.join(str(error).split())}"


if __name__ == "__main__":
    raise SystemExit(main())
