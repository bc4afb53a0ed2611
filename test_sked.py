"""Tests of sked, and what they run against.

    ApiServer        a Kubernetes API server in memory that speaks real HTTP, authorises by install.yaml and validates by its CRD
    Kubelets         plays the DaemonSet controller, the scheduler and the nodes on an ApiServer
    Cluster          what end-to-end tests talk to: an ApiServer, or the real cluster that $SKED_TEST_KUBECONFIG names
    OperatorProcess  sked.py in a process of its own

    python test_sked.py             see sked work on a machine without a cluster
    python test_sked.py bench [N]   what N SchedExts cost

Throughout this file:
    obj       an object as the plain dict that the API returns; one that is stored is never changed, only replaced
    resource  a row of the table of what is served
    version   a resourceVersion, as an int
    cause     (field, reason, message): one thing that is wrong with an object

Where a real API server does it differently, the real one is right: the words of the answers here are those of one (1.36).
"""
from __future__ import annotations

import argparse
import ast
import bisect
import collections
import contextlib
import functools
import hashlib
import heapq
import http.client
import http.server
import importlib.util
import inspect
import io
import itertools
import json
import logging
import os
import random
import re
import select
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml

import sked

HERE = Path(__file__).resolve().parent
MERGE_PATCH = "application/merge-patch+json"
LOG_LENGTH = 20_000  # changes that a watch can start from; older ones are forgotten, as etcd compacts them away


def now(ago: float = 0.0) -> str:
    """The time so many seconds ago, as the API writes it."""
    return datetime.fromtimestamp(time.time() - ago, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(timestamp: str) -> float:
    return time.time() - datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


def copy(value: Any) -> Any:
    """A copy that shares nothing, of what JSON can express."""
    return json.loads(json.dumps(value))


def compact(value: Any) -> str:
    """JSON as Go prints it."""
    return json.dumps(value, separators=(",", ":"))


def dig(value: Any, path: str) -> Any:
    """What a simple JSONPath finds, .a.b[0][?(@.type=="Ready")].c for instance, or None."""
    for name, index, key, wanted in re.findall(r'\.([\w-]+)|\[(\d+)\]|\[\?\(@\.(\w+)==["\'](.*?)["\']\)\]', path):
        if name:
            value = value.get(name) if isinstance(value, dict) else None
        else:
            items = value if isinstance(value, list) else []
            value = next(iter(items[int(index):] if index else [item for item in items if item.get(key) == wanted]), None)
    return value


def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The condition's value as soon as it is true; fails with the last value when the time is up."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s; last seen: {value!r}")
        time.sleep(0.02)
    return value


@functools.cache  # YAML is slow to parse
def manifests(path: Path) -> list[dict]:
    return [obj for obj in yaml.safe_load_all(path.read_text()) if obj]


# ---------------------------------------------------------------- what is served, and how it is refused


class Resource(NamedTuple):
    """One kind of objects; all are served as v1."""
    plural: str
    kind: str
    group: str = ""
    namespaced: bool = True
    short: tuple[str, ...] = ()
    status: bool = False  # has a status subresource
    generation: bool = False  # the changes of its spec are counted
    categories: tuple[str, ...] = ()
    custom: dict = {}  # the version in the CustomResourceDefinition that made it

    @property
    def api_version(self) -> str:
        return f"{self.group}/v1" if self.group else "v1"

    @property
    def root(self) -> str:
        return f"/apis/{self.group}/v1" if self.group else "/api/v1"

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        scope = f"namespaces/{namespace}" if self.namespaced and namespace else ""
        return "/".join(filter(None, (self.root, scope, self.plural, name, subresource)))

    def refusal(self, code: int, reason: str, name: str, message: str, kind: str = "", **details: Any) -> Refusal:
        """A refusal that begins with the name of what it is about: daemonsets.apps "x" ..."""
        what = ".".join(filter(None, (kind or self.plural, self.group)))
        message = message.replace("{}", f'{what} "{name}"' if name or kind else what, 1)
        known = {"name": name, "group": self.group, "kind": kind or self.plural, **details}
        return Refusal(code, reason, message, **{key: value for key, value in known.items() if value})

    def not_found(self, name: str) -> Refusal:
        return self.refusal(404, "NotFound", name, "{} not found")

    def forbidden(self, name: str, why: str) -> Refusal:
        return self.refusal(403, "Forbidden", name, f"{{}} is forbidden: {why}")

    def conflict(self, name: str, why: str = "the object has been modified; please apply your changes to the latest version "
                 "and try again") -> Refusal:
        return self.refusal(409, "Conflict", name, f"Operation cannot be fulfilled on {{}}: {why}")

    def invalid(self, name: str, causes: list[tuple]) -> Refusal:
        texts = [f"{where}: {message}" for where, _, message in causes]
        text = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
        return self.refusal(422, "Invalid", name, f"{{}} is invalid: {text}", self.kind, causes=[
            {"reason": f"FieldValue{reason}", "message": message, "field": where} for where, reason, message in causes])


class Refusal(Exception):
    """An answer of 4xx or 5xx, with the Status that explains it."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code, self.details = code, details
        self.status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "reason": reason,
                       **({"details": details} if details else {}), "code": code}


RBAC = "rbac.authorization.k8s.io"
BUILT_IN = {resource.plural: resource for resource in (
    Resource("namespaces", "Namespace", namespaced=False, short=("ns",)),
    Resource("nodes", "Node", namespaced=False, short=("no",), status=True),
    Resource("pods", "Pod", short=("po",), status=True, categories=("all",)),
    Resource("events", "Event", short=("ev",)),
    Resource("services", "Service", short=("svc",), categories=("all",)),
    Resource("serviceaccounts", "ServiceAccount", short=("sa",)),
    Resource("daemonsets", "DaemonSet", "apps", short=("ds",), status=True, generation=True, categories=("all",)),
    Resource("deployments", "Deployment", "apps", short=("deploy",), status=True, generation=True, categories=("all",)),
    Resource("leases", "Lease", "coordination.k8s.io"),
    Resource("priorityclasses", "PriorityClass", "scheduling.k8s.io", namespaced=False, short=("pc",)),
    Resource("customresourcedefinitions", "CustomResourceDefinition", "apiextensions.k8s.io", namespaced=False, short=("crd",), generation=True),
    Resource("clusterroles", "ClusterRole", RBAC, namespaced=False),
    Resource("clusterrolebindings", "ClusterRoleBinding", RBAC, namespaced=False),
    Resource("roles", "Role", RBAC),
    Resource("rolebindings", "RoleBinding", RBAC),
    Resource("tokenreviews", "TokenReview", "authentication.k8s.io", namespaced=False),
    Resource("subjectaccessreviews", "SubjectAccessReview", "authorization.k8s.io", namespaced=False),
)}
REVIEWS = ("tokenreviews", "subjectaccessreviews")


def wrong(where: str, value: Any, why: str) -> tuple:
    return where, "Invalid", f"Invalid value: {compact(value)}: {why}"


def unsupported(where: str, value: Any, allowed: list | tuple) -> tuple:
    return where, "NotSupported", f"Unsupported value: {compact(value)}: supported values: {', '.join(map(compact, allowed))}"


def mistyped(where: str, value: Any, wanted: str) -> tuple:
    return where, "TypeInvalid", f"Invalid value: {compact(value)}: {where} in body must be of type {wanted}: {compact(value)}"


def required(where: str, why: str = "") -> tuple:
    return where, "Required", f"Required value{why and ': '}{why}"


# ---------------------------------------------------------------- SchedExts: the schema in install.yaml

# The CEL rules of install.yaml, in Python; ~ stands for a pattern in the rule, which is handed over as an argument.
# A rule that is not here fails at start, so that none goes untested unnoticed.
RULES: dict[str, Callable[..., bool]] = {
    "has(self.status) || self.metadata.name.size() <= 63": lambda self: "status" in self or len(self["metadata"].get("name", "")) <= 63,
    "self.matches(~)": lambda self, pattern: matches(pattern, self),
    "self.matches(~) && !self.matches(~)": lambda self, good, bad: matches(good, self) and not matches(bad, self),
    "type(self) == int ? self >= 1 : self.matches(~)": lambda self, percent: self >= 1 if isinstance(self, int) else matches(percent, self),
    "self.all(k, k.size() <= 317 && k.matches(~) && self[k].matches(~))":
        lambda self, key, value: all(len(k) <= 317 and matches(key, k) and matches(value, v) for k, v in self.items()),
    "has(self.key) || has(self.operator) && self.operator == 'Exists'": lambda self: "key" in self or self.get("operator") == "Exists",
    "!has(self.value) || !has(self.operator) || self.operator != 'Exists'":
        lambda self: "value" not in self or self.get("operator") != "Exists",
    "!has(self.tolerationSeconds) || has(self.effect) && self.effect == 'NoExecute'":
        lambda self: "tolerationSeconds" not in self or self.get("effect") == "NoExecute",
    "!has(self.value) || !has(self.valueFrom)": lambda self: not {"value", "valueFrom"} <= self.keys(),
    "[has(self.configMapKeyRef), has(self.secretKeyRef), has(self.fieldRef), has(self.resourceFieldRef)].exists_one(x, x)":
        lambda self: len(self.keys() & {"configMapKeyRef", "secretKeyRef", "fieldRef", "resourceFieldRef"}) == 1,
    "!has(self.rollingUpdate) || !has(self.type) || self.type == 'RollingUpdate'":
        lambda self: "rollingUpdate" not in self or self.get("type", "RollingUpdate") == "RollingUpdate",
}
PATTERN = re.compile(r"(?<=matches\()r?'([^']*)'")
LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool], Callable[[str, Any, Any], tuple]]] = {  # keyword: type, whether it is kept, cause
    "maxLength": ("string", lambda value, most: len(value) <= most,
                  lambda path, value, most: (path, "TooLong", f"Too long: may not be more than {most} bytes")),
    "minLength": ("string", lambda value, least: len(value) >= least,
                  lambda path, value, least: wrong(path, value, f"{path} in body should be at least {least} chars long")),
    "pattern": ("string", lambda value, pattern: matches(pattern, value),
                lambda path, value, pattern: wrong(path, value, f"{path} in body should match '{pattern}'")),
    "minimum": ("integer", lambda value, least: value >= least,
                lambda path, value, least: wrong(path, value, f"{path} in body should be greater than or equal to {least}")),
    "maximum": ("integer", lambda value, most: value <= most,
                lambda path, value, most: wrong(path, value, f"{path} in body should be less than or equal to {most}")),
    "maxItems": ("array", lambda value, most: len(value) <= most,
                 lambda path, value, most: (path, "TooMany", f"Too many: {len(value)}: must have at most {most} items")),
    "minItems": ("array", lambda value, least: len(value) >= least,
                 lambda path, value, least: wrong(path, len(value), f"{path} in body should have at least {least} items")),
    "maxProperties": ("object", lambda value, most: len(value) <= most,
                      lambda path, value, most: (path, "TooMany", f"Too many: {len(value)}: must have at most {most} items")),
    "minProperties": ("object", lambda value, least: len(value) >= least,
                      lambda path, value, least: wrong(path, len(value), f"{path} in body should have at least {least} properties")),
    "enum": ("", lambda value, allowed: value in allowed, unsupported),
    "format": ("", lambda value, form: FORMATS[form](value), lambda path, value, form: mistyped(path, value, form)),
}
FORMATS: dict[str, Callable[[Any], bool]] = {
    "int32": lambda value: -2**31 <= value < 2**31, "int64": lambda value: -2**63 <= value < 2**63,
    "date-time": lambda value: bool(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", value))}
KEYWORDS = {*LIMITS, "type", "description", "properties", "required", "items", "additionalProperties", "anyOf", "x-kubernetes-int-or-string",
            "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type", "x-kubernetes-validations"}
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
SKIPS_RULES = {"TypeInvalid", "Required", "NotSupported", "TooLong", "TooMany"}
SKIPPED = ("<nil>", "Invalid", "Invalid value: null: some validation rules were not checked because the object was invalid; "
           "correct the existing errors to complete validation")
ABSENT = object()


def matches(pattern: str, text: str) -> bool:
    """As Go's regular expressions match: anywhere, and $ only at the very end."""
    return bool(re.search(pattern.replace("$", r"\Z"), text))


def check_schema(schema: dict, path: str = "") -> None:
    """Raises where a schema says something that this server cannot check."""
    unknown = [*schema.keys() - KEYWORDS, *(rule["rule"] for rule in schema.get("x-kubernetes-validations", ())
                                            if PATTERN.sub("~", rule["rule"]) not in RULES)]
    if unknown:
        raise NotImplementedError(f"test_sked.py knows no Python for this at {path or 'the root'} of the schema: {unknown}")
    for name, child in schema.get("properties", {}).items():
        check_schema(child, f"{path}.{name}")
    for child in filter(None, (schema.get("items"), schema.get("additionalProperties"))):
        check_schema(child, f"{path}[]")


def prune(schema: dict, value: Any, path: str, unknown: list[str]) -> Any:
    """The value without nulls and without what its schema does not know, which is added to unknown."""
    if isinstance(value, list):
        return [prune(schema.get("items", {}), item, f"{path}[{i}]", unknown) for i, item in enumerate(value)]
    if not isinstance(value, dict) or path == "metadata":
        return value
    schemas = {name: schema.get("properties", {}).get(name, schema.get("additionalProperties")) for name in value}
    unknown += [f"{path}.{name}".lstrip(".") for name, child in schemas.items() if child is None]
    return {name: prune(child, value[name], f"{path}.{name}".lstrip("."), unknown)
            for name, child in schemas.items() if child is not None and value[name] is not None}


def children(schema: dict, value: Any, path: str, old: Any) -> Iterator[tuple[dict, Any, str, Any]]:
    """(schema, value, path, old value) of what is inside a value."""
    for i, item in enumerate(value if isinstance(value, list) else ()):
        yield schema.get("items", {}), item, f"{path}[{i}]", ABSENT
    for name, item in value.items() if isinstance(value, dict) else ():
        child = schema.get("properties", {}).get(name, schema.get("additionalProperties") or {})
        yield child, item, f"{path}.{name}".lstrip("."), old.get(name, ABSENT) if isinstance(old, dict) else ABSENT


def check(schema: dict, value: Any, path: str = "", old: Any = ABSENT) -> Iterator[tuple]:
    """The causes for which a schema, its rules aside, refuses a value; what was so before is let through, as since 1.30."""
    if value == old:
        return
    kind = NAMES[type(value)]
    wanted = ["integer", "string"] if schema.get("x-kubernetes-int-or-string") else [schema.get("type", kind)]
    if kind not in wanted:
        yield mistyped(path, kind, ",".join(wanted))
        return
    for keyword, (applies_to, kept, cause) in LIMITS.items():
        if keyword in schema and applies_to in ("", kind) and not kept(value, schema[keyword]):
            yield cause(path, value, schema[keyword])
            break
    yield from (required(f"{path}.{name}".lstrip(".")) for name in schema.get("required", ()) if name not in value)
    if schema.get("x-kubernetes-list-type") in ("set", "map"):
        keys = schema.get("x-kubernetes-list-map-keys")
        same = [{key: item.get(key) for key in keys} if keys and isinstance(item, dict) else item for item in value]
        yield from ((f"{path}[{i}]", "Duplicate", f"Duplicate value: {compact(item)}") for i, item in enumerate(same) if item in same[:i])
    for child in children(schema, value, path, old):
        yield from check(*child)


def check_rules(schema: dict, value: Any, path: str = "", old: Any = ABSENT) -> Iterator[tuple]:
    """The causes for which the CEL rules of a schema refuse a value that is of the right types."""
    if value == old:
        return
    for rule in schema.get("x-kubernetes-validations", ()):
        if not RULES[PATTERN.sub("~", rule["rule"])](value, *PATTERN.findall(rule["rule"])):
            said = "" if isinstance(value, (dict, list)) else f"{compact(value)}: "
            yield path or "<nil>", "Invalid", f"Invalid value: {said}{rule['message']}"
    for child in children(schema, value, path, old):
        yield from check_rules(*child)


# ---------------------------------------------------------------- built-in kinds: decoding, defaults, validation

# What a typed decoder keeps: {str: x} is a map, (x,) a pointer, which stays also where it is zero; None takes anything. All else that is
# empty is omitted, and what is not named here is dropped.
QUANTITY, MICRO_TIME, INT_OR_STRING = "quantity", "micro time", "int or string"
META = {"name": str, "generateName": str, "namespace": str, "uid": str, "resourceVersion": str, "generation": int, "labels": {str: str},
        "annotations": {str: str}, "finalizers": [str], "managedFields": None, "creationTimestamp": str, "deletionTimestamp": str,
        "deletionGracePeriodSeconds": (int,), "ownerReferences":
        [{"apiVersion": str, "kind": str, "name": str, "uid": str, "controller": (bool,), "blockOwnerDeletion": (bool,)}]}
KEY_REF = {"name": str, "key": str, "optional": (bool,)}
REQUIREMENTS = [{"key": str, "operator": str, "values": [str]}]
CONTAINER = {
    "name": str, "image": str, "command": [str], "args": [str], "imagePullPolicy": str, "terminationMessagePath": str,
    "terminationMessagePolicy": str, "resources": {"limits": {str: QUANTITY}, "requests": {str: QUANTITY}},
    "env": [{"name": str, "value": str, "valueFrom": {
        "fieldRef": {"apiVersion": str, "fieldPath": str}, "configMapKeyRef": KEY_REF, "secretKeyRef": KEY_REF,
        "resourceFieldRef": {"containerName": str, "resource": str, "divisor": QUANTITY}}}],
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool, "subPath": str}],
    "securityContext": {"privileged": (bool,), "capabilities": None, "runAsUser": (int,)},
    **dict.fromkeys(("envFrom", "ports", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "workingDir"))}
POD = {
    "containers": [CONTAINER], "initContainers": [CONTAINER], "nodeSelector": {str: str}, "nodeName": str, "hostPID": bool, "hostNetwork": bool,
    "priorityClassName": str, "restartPolicy": str, "dnsPolicy": str, "schedulerName": str, "serviceAccountName": str,
    "terminationGracePeriodSeconds": (int,), "imagePullSecrets": [{"name": str}],
    "tolerations": [{"key": str, "operator": str, "value": str, "effect": str, "tolerationSeconds": (int,)}],
    "volumes": [{"name": str, "hostPath": {"path": str, "type": (str,)}, **dict.fromkeys(("emptyDir", "configMap", "secret", "projected"))}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": REQUIREMENTS, "matchFields": REQUIREMENTS}]}, "preferredDuringSchedulingIgnoredDuringExecution": None},
        "podAffinity": None, "podAntiAffinity": None},
    **dict.fromkeys(("securityContext", "automountServiceAccountToken", "hostIPC", "runtimeClassName", "shareProcessNamespace"))}
SHAPES: dict[str, dict] = {
    "daemonsets": {"status": None, "spec": {
        "selector": {"matchLabels": {str: str}, "matchExpressions": REQUIREMENTS}, "minReadySeconds": int, "revisionHistoryLimit": (int,),
        "template": {"metadata": META, "spec": POD},
        "updateStrategy": {"type": str, "rollingUpdate": {"maxUnavailable": INT_OR_STRING, "maxSurge": INT_OR_STRING}}}},
    "leases": {"spec": {"holderIdentity": (str,), "leaseDurationSeconds": (int,), "leaseTransitions": (int,), "acquireTime": MICRO_TIME,
                        "renewTime": MICRO_TIME}},
    "events": {"reason": str, "message": str, "type": str, "count": int, "action": str, "firstTimestamp": str, "lastTimestamp": str,
               "eventTime": MICRO_TIME, "reportingComponent": str, "reportingInstance": str, "source": {"component": str, "host": str},
               "involvedObject": dict.fromkeys(("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion"), str)},
}


def decode(shape: Any, value: Any, path: str, unknown: list[str]) -> Any:
    """The value as a typed decoder keeps it, None where it is omitted; a ValueError for a wrong JSON type."""
    shape, pointer = (shape[0], True) if isinstance(shape, tuple) else (shape, False)
    if shape is None or value is None:
        return value
    if shape is QUANTITY:
        return canonical(value)
    types = (int, str) if shape is INT_OR_STRING else (str,) if shape is MICRO_TIME else (shape if isinstance(shape, type) else type(shape),)
    if type(value) not in types:
        given = {"integer": "number", "boolean": "bool"}.get(NAMES[type(value)], NAMES[type(value)])
        go = {str: "string", int: "int32", bool: "bool", list: "[]struct", dict: "struct"}[types[0]]
        where = re.sub(r"\[[0-9]+\]", "", path)
        raise ValueError(f"json: cannot unmarshal {given} into Go struct field {where} of type {go}")
    if shape is MICRO_TIME and not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", value):
        raise ValueError(f'parsing time "{value}" as "2006-01-02T15:04:05.000000Z07:00": cannot parse "{value[19:]}" as ".000000"')
    if isinstance(value, list):
        return [decode(shape[0], item, f"{path}[{i}]", unknown) for i, item in enumerate(value)] or None
    if not isinstance(value, dict):
        return value if value or pointer or shape is INT_OR_STRING else None
    if str in shape:
        return {name: decode((shape[str],), "" if item is None else item, path, unknown) for name, item in value.items()} or None
    unknown += [f"{path}.{name}".lstrip(".") for name in value.keys() - shape.keys()]
    kept = {name: decode(shape[name], item, f"{path}.{name}".lstrip("."), unknown) for name, item in value.items() if name in shape}
    return {name: item for name, item in kept.items() if item is not None}


def canonical(amount: Any) -> str:
    """A quantity as the API server writes it: 0.5 is 500m, 1024Mi is 1Gi."""
    parts = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+))([eE][-+]?\d+|[KMGTPE]i|[numkMGTPE]?)", str(amount), re.ASCII)
    if not parts or isinstance(amount, bool):
        raise ValueError("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")
    number, suffix = Fraction(parts[1]), parts[2]
    decimal = {name: Fraction(1000) ** power for power, name in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)}
    binary = {f"{name}i": Fraction(1024) ** power for power, name in enumerate("KMGTPE", 1)}
    if suffix[1:].lstrip("+-").isdigit():
        number, units = number * Fraction(10) ** int(suffix[1:]), {f"e{3 * i}" if i else "": Fraction(1000) ** i for i in range(-3, 7)}
    else:
        number *= (decimal | binary)[suffix]
        units = binary if suffix in binary and number.denominator == 1 and abs(number) >= 1024 else decimal
    number = -(-number // decimal["m"]) * decimal["m"]  # finer than milli is rounded up
    unit = max((name for name in units if (number / units[name]).denominator == 1), key=units.__getitem__)
    return f"{number / units[unit]}{unit}" if number else "0"


def set_defaults(obj: dict, **defaults: Any) -> None:
    for name, value in defaults.items():
        obj.setdefault(name, value)


def default_daemonset(obj: dict) -> None:
    """Fills in what the API server fills in."""
    spec = obj.setdefault("spec", {})
    set_defaults(spec, revisionHistoryLimit=10, selector={}, updateStrategy={}, template={})
    if spec["updateStrategy"].setdefault("type", "RollingUpdate") == "RollingUpdate":
        spec["updateStrategy"]["rollingUpdate"] = {"maxUnavailable": 1, "maxSurge": 0} | spec["updateStrategy"].get("rollingUpdate", {})
    spec["template"].setdefault("metadata", {})["creationTimestamp"] = None  # newer servers omit it
    pod = spec["template"].setdefault("spec", {})
    set_defaults(pod, restartPolicy="Always", terminationGracePeriodSeconds=30, dnsPolicy="ClusterFirst", securityContext={},
                 schedulerName="default-scheduler")
    for container in pod.get("containers", []) + pod.get("initContainers", []):
        image, _, digest = container.get("image", "").partition("@")
        tag = image.rpartition("/")[2].partition(":")[2]
        set_defaults(container, resources={}, terminationMessagePath="/dev/termination-log", terminationMessagePolicy="File",
                     imagePullPolicy="Always" if tag == "latest" or not tag and not digest else "IfNotPresent")
        for source in (variable.get("valueFrom", {}) for variable in container.get("env", [])):
            source.get("fieldRef", {}).setdefault("apiVersion", "v1")
            source.get("resourceFieldRef", {}).setdefault("divisor", "0")
    for volume in pod.get("volumes", []):
        volume.get("hostPath", {}).setdefault("type", "")


def check_daemonset(obj: dict, old: dict | None) -> Iterator[tuple]:
    """The causes for which the API server refuses a DaemonSet: of its many only those that sked can meet."""
    spec, template = obj["spec"], obj["spec"]["template"]
    strategy, selector, labels = spec["updateStrategy"], spec["selector"], template["metadata"].get("labels")
    for where, pairs in (("metadata.labels", obj["metadata"].get("labels")), ("spec.selector.matchLabels", selector.get("matchLabels")),
                         ("spec.template.labels", labels), ("spec.template.spec.nodeSelector", template["spec"].get("nodeSelector"))):
        yield from (wrong(where, value, "must be no more than 63 bytes") for value in (pairs or {}).values() if len(value) > 63)
    if not selector.get("matchLabels") or not selector["matchLabels"].items() <= (labels or {}).items():
        yield wrong("spec.template.metadata.labels", labels, "`selector` does not match template `labels`")
    if old and selector != old["spec"]["selector"]:
        yield wrong("spec.selector", selector, "field is immutable")
    if spec.get("minReadySeconds", 0) < 0:
        yield wrong("spec.minReadySeconds", spec["minReadySeconds"], "must be greater than or equal to 0")
    if strategy["type"] not in ("OnDelete", "RollingUpdate"):
        yield unsupported("spec.updateStrategy", strategy, ("RollingUpdate", "OnDelete"))
    for name, value in strategy.get("rollingUpdate", {}).items():
        if isinstance(value, str) and not re.fullmatch("[0-9]+%", value):
            yield wrong(f"spec.updateStrategy.rollingUpdate.{name}", value, "a valid percent string must be a numeric string followed by an "
                        "ending '%' (e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')")
    if strategy.get("rollingUpdate") and {0, "0%"}.issuperset(strategy["rollingUpdate"].values()):
        yield required("spec.updateStrategy.rollingUpdate.maxUnavailable", "cannot be 0 when maxSurge is 0")
    yield from check_pod(template["spec"], "spec.template.spec")


def check_pod(pod: dict, path: str) -> Iterator[tuple]:
    """The causes for which the API server refuses the spec of a pod, likewise."""
    volumes = [volume.get("name") for volume in pod.get("volumes", [])]
    if not pod.get("containers"):
        yield required(f"{path}.containers")
    for i, toleration in enumerate(pod.get("tolerations", [])):
        where, operator = f"{path}.tolerations[{i}]", toleration.get("operator", "")
        if operator not in ("", "Equal", "Exists"):
            yield unsupported(f"{where}.operator", operator, ("Equal", "Exists"))
        if operator == "Exists" and toleration.get("value"):
            yield wrong(f"{where}.operator", toleration["value"], "value must be empty when `operator` is 'Exists'")
        if operator != "Exists" and not toleration.get("key"):
            yield wrong(f"{where}.operator", operator, 'operator must be Exists when `key` is empty, which means "match all values and all keys"')
        if toleration.get("effect", "NoExecute") not in (effects := ("NoSchedule", "PreferNoSchedule", "NoExecute")):
            yield unsupported(f"{where}.effect", toleration["effect"], effects)
    for i, container in enumerate(pod.get("containers", [])):
        where, mounts = f"{path}.containers[{i}]", container.get("volumeMounts", [])
        yield from (required(f"{where}.{name}") for name in ("name", "image") if not container.get(name))
        yield from (required(f"{where}.env[{j}].name") for j, variable in enumerate(container.get("env", [])) if not variable.get("name"))
        if container["imagePullPolicy"] not in (policies := ("Always", "IfNotPresent", "Never")):
            yield unsupported(f"{where}.imagePullPolicy", container["imagePullPolicy"], policies)
        for j, mount in enumerate(mounts):
            if mount.get("name") not in volumes:
                yield f"{where}.volumeMounts[{j}].name", "NotFound", f"Not found: {compact(mount.get('name', ''))}"
            if mount.get("mountPath") in [other.get("mountPath") for other in mounts[:j]]:
                yield wrong(f"{where}.volumeMounts[{j}].mountPath", mount["mountPath"], "must be unique")


# ---------------------------------------------------------------- patches, selectors, tables

MERGE_KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "imagePullSecrets": "name",
              "volumeMounts": "mountPath", "conditions": "type", "ownerReferences": "uid"}


def merge(old: Any, patch: Any, strategic: bool = False) -> Any:
    """What a JSON merge patch makes of a value: null removes. A strategic one also merges lists by the names of their items."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(old) if isinstance(old, dict) and patch.get("$patch") != "replace" else {}
    for name, value in patch.items():
        key = MERGE_KEYS.get(name)
        if value is None:
            merged.pop(name, None)
        elif strategic and key and isinstance(value, list):
            items = {item.get(key): item for item in merged.get(name) or []}
            items |= {item.get(key): merge(items.get(item.get(key)), item, strategic) for item in value}
            merged[name] = [item for item in items.values() if {key: item.get(key), "$patch": "delete"} not in value]
        elif not (strategic and name.startswith("$")):
            merged[name] = merge(merged.get(name), value, strategic)
    return merged


class Selector:
    """The labelSelector and the fieldSelector of a request, as a question about objects."""

    FIELDS = r"metadata\.(name|namespace)|involvedObject\.\w+|reason|type|spec\.nodeName|status\.phase"

    def __init__(self, query: dict[str, str]) -> None:
        self.labels, self.fields = [], []
        for part in filter(None, re.split(r",(?![^(]*\))", query.get("labelSelector", ""))):
            if not (found := re.fullmatch(r"\s*(!?)([\w./-]+)\s*(?:(==?|!=)\s*([\w.-]*)|(in|notin)\s*\(([^)]*)\))?\s*", part)):
                raise Refusal(400, "BadRequest", f"unable to parse requirement: {part}")
            negated, key, sign, value, word, values = found.groups()
            allowed = {value} if sign else {item.strip() for item in values.split(",")} if word else None
            self.labels.append((key, allowed, bool(negated) or sign == "!=" or word == "notin"))
        for part in filter(None, query.get("fieldSelector", "").split(",")):
            name, sign, value = (re.fullmatch(rf"({self.FIELDS})(?:(==?|!=)(.*))", part) or re.fullmatch("(.*)()()()", part)).group(1, 3, 4)
            if not sign:
                raise Refusal(400, "BadRequest", f'"{name}" is not a known field selector: only "metadata.name", "metadata.namespace"')
            self.fields.append((f".{name}", value, sign == "!="))

    def __call__(self, obj: dict) -> bool:
        labels = obj["metadata"].get("labels", {})
        return (all((key in labels and (allowed is None or labels[key] in allowed)) != negated for key, allowed, negated in self.labels)
                and all(((dig(obj, path) or "") == value) != negated for path, value, negated in self.fields))


def age(timestamp: str) -> str:
    """How long ago, in kubectl's short form."""
    seconds = max(0, int(seconds_since(timestamp)))
    minutes, hours = seconds // 60, seconds // 3600
    return f"{seconds}s" if seconds < 120 else f"{minutes}m" if hours < 3 else f"{hours}h" if hours < 48 else f"{hours // 24}d"


def pairs(labels: dict | None) -> str:
    return ",".join(f"{key}={value}" for key, value in (labels or {}).items()) or "<none>"


def pod_state(pod: dict) -> str:
    """What kubectl shows as the STATUS of a pod."""
    state = dig(pod, ".status.containerStatuses[0].state") or {}
    reason = dig(state, ".waiting.reason") or dig(state, ".terminated.reason") or dig(pod, ".status.phase")
    return "Terminating" if "deletionTimestamp" in pod["metadata"] else reason


CREATED = ".metadata.creationTimestamp"
COLUMNS: dict[str, dict[str, str | Callable[[dict], Any]]] = {  # a JSONPath, or a function of the object; * is for -o wide
    "daemonsets": {"Desired": ".status.desiredNumberScheduled", "Current": ".status.currentNumberScheduled", "Ready": ".status.numberReady",
                   "Up-to-date": lambda obj: dig(obj, ".status.updatedNumberScheduled") or 0,
                   "Available": lambda obj: dig(obj, ".status.numberAvailable") or 0,
                   "Node Selector": lambda obj: pairs(dig(obj, ".spec.template.spec.nodeSelector")), "Age": CREATED,
                   "*Images": ".spec.template.spec.containers[0].image", "*Selector": lambda obj: pairs(dig(obj, ".spec.selector.matchLabels"))},
    "pods": {"Ready": lambda obj: f"{int(bool(dig(obj, '.status.containerStatuses[0].ready')))}/1", "Status": pod_state,
             "Restarts": lambda obj: dig(obj, ".status.containerStatuses[0].restartCount") or 0, "Age": CREATED,
             "*Node": lambda obj: obj["spec"].get("nodeName", "<none>")},
    "nodes": {"Status": lambda obj: "Ready" if dig(obj, '.status.conditions[?(@.type=="Ready")].status') == "True" else "NotReady",
              "Labels": lambda obj: pairs(obj["metadata"].get("labels")), "Age": CREATED},
    "events": {"Last Seen": lambda obj: age(obj.get("lastTimestamp") or dig(obj, CREATED)), "Type": ".type", "Reason": ".reason",
               "Object": lambda obj: f"{obj['involvedObject']['kind'].lower()}/{obj['involvedObject']['name']}", "Message": ".message"},
    "leases": {"Holder": ".spec.holderIdentity", "Age": CREATED},
}


def make_table(resource: Resource, objs: list[dict], metadata: dict) -> dict:
    """The table that kubectl prints, made by the server."""
    columns = {"*" * column.get("priority", 0) + column["name"]: column["jsonPath"]
               for column in resource.custom.get("additionalPrinterColumns", ())} or COLUMNS.get(resource.plural, {"Age": CREATED})
    columns = {"Name": ".metadata.name"} | columns if resource.plural != "events" else columns

    def cell(obj: dict, column: str | Callable) -> Any:
        return column(obj) if callable(column) else age(dig(obj, CREATED)) if column == CREATED else dig(obj, column)

    return {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
            "columnDefinitions": [{"name": name.lstrip("*"), "type": "string", "format": "name" if name == "Name" else "", "description": "",
                                   "priority": int(name.startswith("*"))} for name in columns],
            "rows": [{"cells": [cell(obj, column) for column in columns.values()], "object": {
                "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}} for obj in objs]}


def print_table(table: dict) -> str:
    """A table as kubectl prints it."""
    shown = [i for i, column in enumerate(table["columnDefinitions"]) if not column["priority"]]
    rows = [[table["columnDefinitions"][i]["name"].upper() for i in shown]]
    rows += [["" if row["cells"][i] is None else str(row["cells"][i]) for i in shown] for row in table["rows"]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("   ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


# ---------------------------------------------------------------- the API server


@dataclass
class Request:
    """One request, and afterwards the record of it."""
    method: str
    path: str
    user: str
    query: dict[str, str] = field(default_factory=dict)
    kind: Resource | None = None
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    verb: str = "get"
    accept: str = ""
    warnings: list[str] = field(default_factory=list)
    status: int = 0  # of the answer; stays 0 where a fault swallowed it
    time: float = field(default_factory=time.time)

    @property
    def resource(self) -> str:
        return self.kind.plural if self.kind else ""

    @property
    def what(self) -> str:
        """The resource as RBAC has it, with the subresource."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


@dataclass
class Fault:
    """A misbehaviour: the requests that it meets, how many of them, and what becomes of them."""
    method: str
    path: re.Pattern
    times: int | None
    action: str
    status: int
    headers: dict[str, str]
    body: Any
    hits: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def clear(self) -> None:
        self.over.set()


class Change(NamedTuple):
    version: int
    type: str
    obj: dict
    old: dict | None


class Client:
    """What can be asked of an API server in a test; a Refusal is raised where it refuses."""

    resources: dict[str, Resource]

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json", **who: str) -> Any:
        raise NotImplementedError

    def create(self, obj: dict, **who: str) -> dict:
        kind = next(kind for kind in self.resources.values() if (kind.api_version, kind.kind) == (obj["apiVersion"], obj["kind"]))
        return self.call("POST", kind.path(obj["metadata"].get("namespace", "default")), obj, **who)

    def get(self, resource: str, namespace: str, name: str) -> dict | None:
        """The object, or None where there is none."""
        try:
            return self.call("GET", self.resources[resource].path(namespace, name))
        except Refusal as refusal:
            if refusal.code == 404:
                return None
            raise

    def list(self, resource: str, namespace: str = "") -> list[dict]:
        return self.call("GET", self.resources[resource].path(namespace))["items"]

    def patch(self, resource: str, namespace: str, name: str, patch: dict, subresource: str = "", **who: str) -> dict:
        return self.call("PATCH", self.resources[resource].path(namespace, name, subresource), patch, MERGE_PATCH, **who)

    def delete(self, resource: str, namespace: str, name: str, policy: str = "Background", **who: str) -> dict:
        options = {"propagationPolicy": policy, "gracePeriodSeconds": 0}
        return self.call("DELETE", self.resources[resource].path(namespace, name), options, **who)


class ApiServer(Client):
    """A Kubernetes API server in memory, on 127.0.0.1, to which install.yaml has been applied.

    Its users are admin (may do all), sked (what install.yaml binds to the operator's service account) and nobody (nothing);
    the token of each is its name.
    """

    USERS = {"sked": "system:serviceaccount:sked-system:sked-controller-manager"}  # the names that RBAC knows them by
    ALMIGHTY = ("admin", "kubelets")

    def __init__(self, install: Path | str = HERE / "install.yaml", tls: ssl.SSLContext | None = None) -> None:
        self.changed = threading.Condition(threading.RLock())  # guards all that follows
        self.objects: dict[str, dict[tuple[str, str], dict]] = collections.defaultdict(dict)
        self.resources = dict(BUILT_IN)
        self.log: dict[str, list[Change]] = collections.defaultdict(list)
        self.version = self.oldest = 1000  # a watch can start at the oldest version or later
        self.epoch = 0  # a watch ends with its epoch
        self.uids: dict[str, tuple[str, str, str]] = {}  # where the object with that uid is
        self.dependents: dict[str, set[tuple[str, str, str]]] = collections.defaultdict(set)  # by the uid of their owner
        self.suspects: set[tuple[str, str, str]] = set()  # for the garbage collector to look at
        self.pages: dict[str, tuple[int, list[dict]]] = {}  # what is left of a list, by continue token
        self.logs: dict[str, str] = {}  # for kubectl logs, by the uid of the pod
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.connections: set[socket.socket] = set()
        self.tokens = {user: user for user in ("admin", "sked", "nobody", "kubelets")}
        self.anonymous = ""  # the user of a request without token, for kubectl, which sends none without TLS
        self.metrics_readers: set[str] = set()  # users who may get /metrics
        self.validate = True  # False: as before the CRD had its schema
        self.collect = True  # False: the garbage collector rests
        self.graceful = False  # True: a pod that is deleted waits for its kubelet
        self.delay = 0.0  # seconds before each answer
        self.bookmark_seconds = 60.0
        self.expired_as_status = False  # True: 410 to a watch from a forgotten version, where newer servers send an ERROR event
        self.refuse_future = False  # True: 504 to a watch from a version to come, to which newer servers just stay silent
        self.thawed, self.stopping = threading.Event(), threading.Event()
        self.thawed.set()
        self.port, self.tls = 0, tls
        namespaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in ("default", "kube-system")]
        for obj in namespaces + manifests(Path(install)):
            self.create(obj)
        self.requests.clear()

    def __enter__(self) -> ApiServer:
        self.folder = Path(tempfile.mkdtemp(prefix="sked-"))
        self.start_listening()
        threading.Thread(target=self.collect_garbage, name="garbage collector", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stopping.set()
        for fault in self.faults:
            fault.clear()
        self.thaw()
        self.stop_listening()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"http{'s' * bool(self.tls)}://127.0.0.1:{self.port}"

    def kubeconfig(self, user: str) -> Path:
        """The path of a kubeconfig for one of the users."""
        path = self.folder / f"{user}.kubeconfig"
        path.write_text(yaml.safe_dump(kubeconfig_of({"server": self.url}, user)))
        return path

    # -- misbehaviour

    def fault(self, method: str = "GET", path: str = "", times: int | None = 1, action: str = "error", status: int = 500,
              headers: dict[str, str] | None = None, body: Any = None) -> Fault:
        """Lets the next requests fail whose path and query match; None times: until clear() is called on what is returned.

        error     answers status, headers and body        garbage   answers 200 and something that is not JSON
        drop      closes the connection, nothing done     lose      does what is asked, then closes without an answer
        truncate  closes in the middle of the answer      stall     falls silent in the middle of the answer, until cleared
        hang      answers nothing until cleared and does nothing
        """
        self.faults.append(Fault(method, re.compile(path), times, action, status, headers or {}, body))
        return self.faults[-1]

    def next_fault(self, method: str, path: str) -> Fault | None:
        with self.changed if self.faults else contextlib.nullcontext():
            for fault in self.faults:
                if re.fullmatch(fault.method, method) and not fault.over.is_set() and fault.hits != fault.times and fault.path.search(path):
                    fault.hits += 1
                    return fault
        return None

    def freeze(self) -> None:
        """From now on nothing is answered, and watches are silent; connections are taken."""
        self.thawed.clear()

    def thaw(self) -> None:
        self.thawed.set()

    def drop_connections(self) -> None:
        """Cuts every connection, watches too."""
        with self.changed:
            self.epoch += 1
            self.changed.notify_all()
            for connection in list(self.connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def stop_listening(self) -> None:
        """The server is gone: connections are cut and new ones refused."""
        self.http.shutdown()
        self.http.server_close()
        self.drop_connections()

    def start_listening(self) -> None:
        """The server is there, or there again on the same port."""
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), type("Handler", (ApiHandler,), {"api": self}))
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        if self.tls:
            self.http.socket = self.tls.wrap_socket(self.http.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.http.serve_forever, args=(0.05,), name="API server", daemon=True).start()

    def compact(self) -> None:
        """Forgets the past: new watches from older versions and lists under way get 410."""
        with self.changed:
            self.oldest = self.version
            self.pages.clear()

    def snapshot(self) -> Any:
        """All that is stored, for restore()."""
        with self.changed:
            return self.version, {plural: dict(objs) for plural, objs in self.objects.items()}

    def restore(self, snapshot: Any) -> None:
        """Goes back to a snapshot and to its version, as a restore from a backup does, with the restart that it takes."""
        with self.changed:
            self.version, objects = snapshot
            self.objects = collections.defaultdict(dict, {plural: dict(objs) for plural, objs in objects.items()})
            for kept in (self.log, self.uids, self.dependents, self.suspects):
                kept.clear()
            for plural, objs in self.objects.items():
                for key, obj in objs.items():
                    self.keep_kin((plural, *key), obj, None)
            self.compact()
            self.drop_connections()

    # -- for tests: as admin, without HTTP

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json", user: str = "admin") -> Any:
        return copy(self.serve(self.parse(method, path, user), json.dumps(body).encode() if body is not None else b"", content_type))

    def writes(self, since: float = 0.0, user: str = "sked", leases: bool = False) -> list[Request]:
        """The writes that a user has sent since then (a time.time()), also those that were refused."""
        return [request for request in list(self.requests) if request.user == user and request.time >= since
                and request.verb in ("create", "update", "patch", "delete", "deletecollection")
                and request.resource not in REVIEWS and (leases or request.resource != "leases")]

    # -- who may do what

    def authenticate(self, token: str) -> str:
        """The user whose bearer token it is."""
        if user := self.tokens.get(token) if token else self.anonymous:
            return user
        raise Refusal(401, "Unauthorized", "Unauthorized")

    def rules(self, user: str) -> Iterator[tuple[str, dict]]:
        """(namespace or "" for all of them, rule) for every rule that is bound to the user."""
        for bindings in ("clusterrolebindings", "rolebindings"):
            for (namespace, _), binding in self.objects[bindings].items():
                subjects = [f"system:serviceaccount:{subject['namespace']}:{subject['name']}" if subject["kind"] == "ServiceAccount"
                            else subject["name"] for subject in binding.get("subjects", [])]
                if self.USERS.get(user, user) in subjects:
                    kind, name = binding["roleRef"]["kind"], binding["roleRef"]["name"]
                    role = self.objects["clusterroles"].get(("", name)) if kind == "ClusterRole" else self.objects["roles"].get((namespace, name))
                    yield from ((namespace, rule) for rule in (role or {}).get("rules", []))

    def allowed(self, user: str, verb: str, group: str = "", what: str = "", namespace: str = "", name: str = "", path: str = "") -> bool:
        """Whether a user may do that to a resource, or to a path that is none."""
        asked = {"verbs": verb, "nonResourceURLs": path} if path else {"verbs": verb, "apiGroups": group, "resources": what}
        return user in self.ALMIGHTY or path == "/metrics" and user in self.metrics_readers or any(
            where in ("", namespace) and all({value, "*"} & set(rule.get(part, ())) for part, value in asked.items())
            and (not rule.get("resourceNames") or name in rule["resourceNames"]) for where, rule in self.rules(user))

    def authorise(self, request: Request) -> None:
        """Refuses what is not allowed; discovery is for everybody."""
        user, kind = self.USERS.get(request.user, request.user), request.kind
        if kind is None:
            if not re.match(r"/(apis?|openapi|version|readyz)\b", request.path) and not self.allowed(request.user, "get", path=request.path):
                raise Refusal(403, "Forbidden", f'forbidden: User "{user}" cannot get path "{request.path}"')
        elif not self.allowed(request.user, request.verb, kind.group, request.what, request.namespace, request.name):
            where = f'in the namespace "{request.namespace}"' if request.namespace else "at the cluster scope"
            raise kind.forbidden(request.name, f'User "{user}" cannot {request.verb} resource "{request.what}" in API group "{kind.group}" {where}')

    def check_owners(self, request: Request, name: str, owners: list[dict], before: list[dict] | None) -> None:
        """What the admission plugin OwnerReferencesPermissionEnforcement asks for; before is None for a new object."""
        kind, namespace = request.kind, request.namespace
        if before is not None and owners != before and not self.allowed(request.user, "delete", kind.group, kind.plural, namespace, name):
            raise kind.forbidden(name, "cannot set an ownerRef on a resource you can't delete: , <nil>")
        for owner in owners:
            of = next((r for r in self.resources.values() if (r.api_version, r.kind) == (owner["apiVersion"], owner["kind"])), Resource("?", "?"))
            if owner.get("blockOwnerDeletion") and owner not in (before or ()) and not self.allowed(
                    request.user, "update", of.group, f"{of.plural}/finalizers", namespace, owner["name"]):
                raise kind.forbidden(name, "cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers "
                                           "on: , <nil>")

    # -- requests

    def parse(self, method: str, target: str, user: str, accept: str = "") -> Request:
        """What is asked for."""
        path, _, query = target.partition("?")
        request = Request(method, target, user, dict(urllib.parse.parse_qsl(query)), accept=accept)
        parts = path.strip("/").split("/")
        root, parts = parts[:3 if parts[0] == "apis" else 2], parts[3 if parts[0] == "apis" else 2:]
        if parts[0:1] == ["namespaces"] and len(parts) > 2 and parts[2] != "status":
            request.namespace, parts = parts[1], parts[2:]
        plural, name, subresource = (*parts, "", "", "")[:3]
        kind = self.resources.get(plural)
        if kind and kind.root == "/" + "/".join(root) and not (request.namespace and not kind.namespaced):
            request.kind, request.name, request.subresource = kind, name, subresource
            reading = "get" if name else "watch" if request.query.get("watch") in ("true", "1") else "list"
            request.verb = {"GET": reading, "POST": "create", "PUT": "update", "PATCH": "patch",
                            "DELETE": "delete" if name else "deletecollection"}.get(method, method.lower())
        return request

    def serve(self, request: Request, body: bytes, content_type: str) -> Any:
        """What is answered: a dict, a text, or for a watch the iterator of its events; a Refusal is raised. Keeps the record."""
        request.status = 201 if request.verb == "create" else 200
        try:
            with self.changed:
                self.authorise(request)
                if request.kind is None:
                    return self.discover(request.path.partition("?")[0])
                if request.what == "pods/log":
                    return self.logs.get(self.find(request)["metadata"]["uid"], "")
                if request.subresource not in ("", "status" if request.kind.status else ""):
                    raise Refusal(404, "NotFound", "the server could not find the requested resource")
                action, named = getattr(self, f"do_{request.verb}", None), request.verb in ("get", "update", "patch", "delete")
                if not action or bool(request.name) != named:
                    raise Refusal(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
                return action(request, *([self.read(request, body, content_type), content_type] if request.method != "GET" else []))
        except Refusal as refusal:
            request.status = refusal.code
            raise
        finally:
            self.requests.append(request)

    def read(self, request: Request, body: bytes, content_type: str) -> dict:
        try:
            value = yaml.safe_load(body) if "yaml" in content_type else json.loads(body or b"{}")
        except (ValueError, yaml.YAMLError) as error:
            raise Refusal(400, "BadRequest", f"the object provided is unrecognized (must be of type {request.kind.kind}): {error}") from None
        if not isinstance(value, dict):
            raise Refusal(400, "BadRequest", f"error decoding patch: json: cannot unmarshal {NAMES[type(value)]} into Go value of type "
                                             "map[string]interface {}")
        return value

    def find(self, request: Request) -> dict:
        if found := self.objects[request.resource].get((request.namespace, request.name)):
            return found
        raise request.kind.not_found(request.name)

    def select(self, request: Request) -> list[dict]:
        """The objects that a request without a name is about, in the order of their names."""
        wanted = Selector(request.query)
        found = self.objects[request.resource]
        return [found[key] for key in sorted(found) if request.namespace in ("", key[0]) and wanted(found[key])]

    def do_get(self, request: Request) -> dict:
        obj = self.find(request)
        return make_table(request.kind, [obj], {}) if "as=Table" in request.accept else obj

    def do_list(self, request: Request) -> dict:
        query = request.query
        self.not_to_come(query.get("resourceVersion") or "0")
        if not (token := query.get("continue")):
            version, items = self.version, self.select(request)
        elif token in self.pages:
            version, items = self.pages[token]
        else:
            raise Refusal(410, "Expired", "The provided continue parameter is too old to display a consistent list result. You can start a new "
                          "list without the continue parameter.")
        limit, metadata = int(query.get("limit") or 0), {"resourceVersion": str(version)}
        if 0 < limit < len(items) and query.get("resourceVersion") != "0":  # which is answered from a cache, never in pages
            metadata["continue"] = uuid.uuid4().hex
            self.pages[metadata["continue"]] = version, items[limit:]
            items = items[:limit]
        return make_table(request.kind, items, metadata) if "as=Table" in request.accept else self.list_of(request.kind, items, metadata)

    def list_of(self, kind: Resource, objs: list[dict], metadata: dict) -> dict:
        """A list; as from a real server, only items that are custom resources say what they are."""
        items = objs if kind.custom else [{key: obj[key] for key in obj if key not in ("kind", "apiVersion")} for obj in objs]
        return {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items}

    def not_to_come(self, version: str) -> int:
        """The version as a number, unless it lies in the future."""
        if int(version) > self.version:
            raise Refusal(504, "Timeout", f"Timeout: Too large resource version: {version}, current: {self.version}", retryAfterSeconds=1,
                          causes=[{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}])
        return int(version)

    def do_watch(self, request: Request) -> Iterator[dict | None]:
        asked, first = request.query.get("resourceVersion") or "0", []
        version = self.not_to_come(asked) if self.refuse_future else int(asked)
        if not version:
            version, first = self.version, [("ADDED", obj) for obj in self.select(request)]
        elif version < self.oldest:
            refusal = Refusal(410, "Expired", f"too old resource version: {version} ({self.oldest})")
            if self.expired_as_status:
                raise refusal
            return iter([{"type": "ERROR", "object": refusal.status}])
        return self.follow(request, Selector(request.query), version, self.epoch, first)

    def follow(self, request: Request, wanted: Selector, version: int, epoch: int, events: list[tuple[str, dict]]) -> Iterator[dict | None]:
        """The events after a version, with None whenever there is nothing to say, so that the caller can see whether anybody listens."""
        kind, bookmarks, start = request.kind, request.query.get("allowWatchBookmarks") in ("true", "1"), time.monotonic()
        deadline, bookmark_at = start + float(request.query.get("timeoutSeconds") or 1800), start + self.bookmark_seconds
        while True:
            for name, obj in events:
                yield {"type": name, "object": make_table(kind, [obj], {}) if "as=Table" in request.accept and name != "BOOKMARK" else obj}
            if time.monotonic() >= deadline or self.epoch != epoch or self.stopping.is_set():
                return
            yield None
            with self.changed:
                wait = min(1.0, deadline - time.monotonic(), bookmark_at - time.monotonic() if bookmarks else 1.0)
                self.changed.wait_for(lambda: self.version > version or self.epoch != epoch or self.stopping.is_set(), max(0.0, wait))
                events = list(self.relevant(self.changes(kind.plural, version), request.namespace, wanted))
                version = max(version, self.version)
                if bookmarks and time.monotonic() >= bookmark_at and version == self.version:
                    bookmark_at = time.monotonic() + self.bookmark_seconds
                    events.append(("BOOKMARK", {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": {
                        "resourceVersion": str(version), "creationTimestamp": None}}))

    def changes(self, resource: str, since: int) -> list[Change]:
        log = self.log[resource]
        return log[bisect.bisect_right(log, since, key=lambda change: change.version):]

    def relevant(self, changes: list[Change], namespace: str, wanted: Selector) -> Iterator[tuple[str, dict]]:
        """Changes as a selector sees them: what begins to match is added, what ceases to match is deleted."""
        for _, kind, obj, old in changes:
            was, is_now = old is not None and wanted(old), kind != "DELETED" and wanted(obj)
            if namespace not in ("", obj["metadata"].get("namespace")):
                continue
            if was and not is_now:
                yield "DELETED", {**old, "metadata": {**old["metadata"], "resourceVersion": obj["metadata"]["resourceVersion"]}}
            elif is_now:
                yield "MODIFIED" if was else "ADDED", obj

    # -- writes

    def do_create(self, request: Request, obj: dict, *_: Any) -> dict:
        kind = request.kind
        if kind.plural in REVIEWS:
            return {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": {}, "spec": obj["spec"], "status": self.review(obj["spec"])}
        if kind.status and kind.plural != "nodes":
            obj.pop("status", None)
        obj = self.admit(request, obj, None)
        meta, name = obj["metadata"], obj["metadata"]["name"]
        if kind.namespaced and ("", request.namespace) not in self.objects["namespaces"]:
            raise BUILT_IN["namespaces"].not_found(request.namespace)
        if (request.namespace, name) in self.objects[kind.plural]:
            raise kind.refusal(409, "AlreadyExists", name, "{} already exists")
        request.name = name
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), **({"generation": 1} if kind.generation else {}),
                 **({"namespace": request.namespace} if kind.namespaced else {})}
        if kind.plural == "daemonsets":
            meta.setdefault("annotations", {})["deprecated.daemonset.template.generation"] = "1"
            obj["status"] = dict.fromkeys(("currentNumberScheduled", "numberMisscheduled", "desiredNumberScheduled", "numberReady"), 0)
        elif kind.plural in ("pods", "namespaces"):
            obj["status"] = {"phase": "Pending" if kind.plural == "pods" else "Active"}
        return self.commit(request, "ADDED", obj, None)

    def do_update(self, request: Request, obj: dict, *_: Any) -> dict:
        missing = (request.namespace, request.name) not in self.objects[request.resource]
        if request.resource == "leases" or request.kind.custom:
            if missing and request.resource == "leases":
                request.status = 201
                return self.do_create(request, obj)  # one of the few kinds that PUT creates
            if not dig(obj, ".metadata.resourceVersion") and not missing:
                raise request.kind.invalid(request.name, [wrong("metadata.resourceVersion", 0, "must be specified for an update")])
        return self.replace(request, self.find(request), obj)

    def do_patch(self, request: Request, patch: dict, content_type: str) -> dict:
        strategic = content_type == "application/strategic-merge-patch+json" and not request.kind.custom
        if not strategic and content_type != MERGE_PATCH:
            raise Refusal(415, "UnsupportedMediaType", "the body of the request was in an unknown format - accepted media types include: "
                                                       + MERGE_PATCH)
        old = self.find(request)
        try:
            return self.replace(request, old, merge(old, patch, strategic))
        except Refusal as refusal:
            if "cannot be handled" in str(refusal) and "strict" not in str(refusal):  # the real one is no clearer
                raise Refusal(422, "Invalid", f' "" is invalid: patch: Invalid value: {json.dumps(compact(patch))}: {refusal}') from None
            raise

    def replace(self, request: Request, old: dict, new: dict) -> dict:
        """Puts a new state in the place of the old one, as far as the request may change it."""
        kind, name, before, meta = request.kind, request.name, old["metadata"], new.get("metadata") or {}
        if meta.get("name", name) != name:
            raise Refusal(400, "BadRequest", f"the name of the object ({meta['name']}) does not match the name on the URL ({name})")
        if meta.get("resourceVersion", before["resourceVersion"]) != before["resourceVersion"]:
            raise kind.conflict(name)
        if meta.get("uid", before["uid"]) != before["uid"] and not request.subresource:  # which a status write ignores
            raise (kind.invalid(name, [wrong("metadata.uid", meta["uid"], "field is immutable")]) if request.verb == "patch" else
                   kind.conflict(name, f"Precondition failed: UID in precondition: {meta['uid']}, UID in object meta: {before['uid']}"))
        if request.subresource:
            new = {**old, "status": new.get("status")}
        else:
            fixed = {"namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp",
                     "deletionGracePeriodSeconds", "managedFields"}
            meta = {key: meta[key] for key in meta.keys() - fixed} | {key: before[key] for key in before.keys() & fixed}
            new = {**new, "metadata": meta, **({"status": old.get("status")} if kind.status else {})}
        new = self.admit(request, copy({key: value for key, value in new.items() if value is not None}), old)
        meta = new["metadata"]
        if kind.plural == "daemonsets":
            count = int(before["annotations"]["deprecated.daemonset.template.generation"]) + (new["spec"]["template"] != old["spec"]["template"])
            meta.setdefault("annotations", {})["deprecated.daemonset.template.generation"] = str(count)
        if new == old:
            return old
        if kind.generation and not request.subresource and new.get("spec") != old.get("spec"):
            meta["generation"] += 1
        return self.commit(request, "DELETED" if "deletionTimestamp" in meta and not meta.get("finalizers") else "MODIFIED", new, old)

    def admit(self, request: Request, obj: dict, old: dict | None) -> dict:
        """The object as it will be stored: decoded, defaulted, validated, and with owners that it may have."""
        kind, unknown, causes = request.kind, [], []
        given = obj.setdefault("apiVersion", kind.api_version), obj.setdefault("kind", "" if kind.custom else kind.kind)
        try:
            if given != (kind.api_version, kind.kind):
                raise ValueError(f'no kind "{given[1]}" is registered for version "{given[0]}"')
            known = SHAPES.get(kind.plural, dict.fromkeys(obj))
            obj = decode({**known, "apiVersion": str, "kind": str, "metadata": META}, obj, "", unknown)
            if kind.custom and self.validate:
                obj = prune(kind.custom["schema"]["openAPIV3Schema"], obj, "", unknown)
            if unknown and request.query.get("fieldValidation") == "Strict":
                raise ValueError("strict decoding error: " + ", ".join(f'unknown field "{path}"' for path in unknown))
        except ValueError as error:
            raise Refusal(400, "BadRequest", f'{kind.kind} in version "v1" cannot be handled as a {kind.kind}: {error}') from None
        request.warnings += [f'unknown field "{path}"' for path in unknown]
        meta = obj.setdefault("metadata", {})
        if "generateName" in meta:
            meta.setdefault("name", meta["generateName"] + "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5)))
        name, owners = meta.get("name", ""), meta.get("ownerReferences", [])
        if meta.get("namespace", request.namespace) != request.namespace:
            raise Refusal(400, "BadRequest", "the namespace of the provided object does not match the namespace sent on the request")
        if not name:
            causes.append(required("metadata.name", "name or generateName is required"))
        elif kind.group != RBAC and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{,251}[a-z0-9])?", name):
            causes.append(wrong("metadata.name", name, "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, "
                                "'-' or '.', and must start and end with an alphanumeric character"))
        causes += [wrong(f"metadata.ownerReferences.{part}", "", "must not be empty") for owner in owners
                   for part in ("apiVersion", "kind", "name", "uid") if part not in owner]
        if sum(bool(owner.get("controller")) for owner in owners) > 1:
            causes.append(wrong("metadata.ownerReferences", owners, "Only one reference can have Controller set to true"))
        causes += self.causes(request, obj, old)
        if causes:
            raise kind.invalid(name, causes)
        self.check_owners(request, name, owners, old and old["metadata"].get("ownerReferences", []))
        return obj

    def causes(self, request: Request, obj: dict, old: dict | None) -> Iterator[tuple]:
        """What is wrong with an object of its kind; fills in the defaults first."""
        kind, plural = request.kind, request.resource
        if kind.custom and self.validate:
            schema = kind.custom["schema"]["openAPIV3Schema"]
            before = prune(schema, old, "", []) if old else ABSENT
            found = list(check(schema, obj, "", before))
            yield from found
            yield from [SKIPPED] if SKIPS_RULES & {reason for _, reason, _ in found} else check_rules(schema, obj, "", before)
        elif plural == "daemonsets":
            default_daemonset(obj)
            yield from check_daemonset(obj, old)
        elif plural == "events" and obj.get("involvedObject", {}).get("namespace", request.namespace) != request.namespace:
            yield wrong("involvedObject.namespace", obj["involvedObject"]["namespace"], "does not match event.namespace")
        elif plural == "leases" and obj.get("spec", {}).get("leaseDurationSeconds", 1) <= 0:
            yield wrong("spec.leaseDurationSeconds", obj["spec"]["leaseDurationSeconds"], "must be greater than 0")
        elif plural == "customresourcedefinitions":
            check_schema(obj["spec"]["versions"][0]["schema"]["openAPIV3Schema"])

    def do_delete(self, request: Request, options: dict, *_: Any) -> dict:
        kind, found = request.kind, [self.find(request)] if request.name else self.select(request)
        wanted = dig(options, ".preconditions.uid")
        for obj in found:
            uid, name = obj["metadata"]["uid"], obj["metadata"]["name"]
            if wanted not in (None, uid):
                raise kind.conflict(name, f"the UID in the precondition ({wanted}) does not match the UID in record ({uid}). "
                                          "The object might have been deleted and then recreated")
            policy = options.get("propagationPolicy") or request.query.get("propagationPolicy") or "Background"
            self.remove(request, obj, policy, options.get("gracePeriodSeconds", 30))
        if not request.name:
            return self.list_of(kind, found, {"resourceVersion": str(self.version)})
        return self.objects[kind.plural].get((request.namespace, request.name)) or {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
            "details": {"name": request.name, "group": kind.group, "kind": kind.plural, "uid": found[0]["metadata"]["uid"]}}

    do_deletecollection = do_delete

    def remove(self, request: Request, obj: dict, policy: str = "Background", grace: float = 30) -> None:
        """Deletes an object, or marks it where finalizers or a kubelet are waited for."""
        meta, plural = obj["metadata"], request.resource
        asked = {"Foreground": ["foregroundDeletion"], "Orphan": ["orphan"]}.get(policy, [])
        finalizers = list(dict.fromkeys(meta.get("finalizers", []) + asked))
        if finalizers or plural == "pods" and self.graceful and grace and obj["spec"].get("nodeName"):
            if "deletionTimestamp" not in meta:
                marks = {"deletionTimestamp": now(), "deletionGracePeriodSeconds": 0, **({"finalizers": finalizers} if finalizers else {})}
                marks |= {"generation": meta["generation"] + 1} if "generation" in meta else {}
                self.commit(request, "MODIFIED", {**obj, "metadata": {**meta, **marks}}, obj)
            return
        inside = {"namespaces": lambda kind, key: kind.namespaced and key[0] == meta["name"],
                  "customresourcedefinitions": lambda kind, key: meta["name"] == f"{kind.plural}.{kind.group}"}.get(plural)
        for kind in list(self.resources.values()) if inside else ():
            for key in [key for key in self.objects[kind.plural] if inside(kind, key)]:
                self.commit(Request("DELETE", "", request.user, kind=kind), "DELETED", gone := self.objects[kind.plural][key], gone)
        self.commit(request, "DELETED", obj, obj)

    def commit(self, request: Request, kind: str, obj: dict, old: dict | None) -> dict:
        """Makes a change under the next version and tells the watches."""
        if request.query.get("dryRun"):
            return obj
        self.version += 1
        plural, version = request.resource, str(self.version)
        # A real server lists every field here; it is enough to see that nobody keeps it.
        fields = [{"manager": request.user, "operation": "Update", "apiVersion": request.kind.api_version, "time": now(), "fieldsType": "FieldsV1",
                   "fieldsV1": {f"f:{name}": {} for name in obj}}]
        obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": version, "managedFields": fields}}
        key = obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
        if kind == "DELETED":
            del self.objects[plural][key]
        else:
            self.objects[plural][key] = obj
        log = self.log[plural]
        log.append(Change(self.version, kind, obj, old))
        if len(log) > LOG_LENGTH:
            self.oldest = max(self.oldest, log[LOG_LENGTH // 2].version)
            del log[:LOG_LENGTH // 2]
        self.keep_kin((plural, *key), obj, old, gone=kind == "DELETED")
        if plural == "customresourcedefinitions":
            spec, names, served = obj["spec"], obj["spec"]["names"], obj["spec"]["versions"][0]
            self.resources.pop(names["plural"], None)
            if kind != "DELETED":
                self.resources[names["plural"]] = Resource(
                    names["plural"], names["kind"], spec["group"], spec["scope"] == "Namespaced", tuple(names.get("shortNames", ())),
                    "status" in served.get("subresources", {}), True, tuple(names.get("categories", ())), served)
        self.changed.notify_all()
        return obj

    # -- garbage collection

    def keep_kin(self, key: tuple[str, str, str], obj: dict, old: dict | None, gone: bool = False) -> None:
        """Keeps track of who owns whom, and of whom the garbage collector has to look at."""
        uid, owners = obj["metadata"]["uid"], owners_of(obj)
        for owner in owners_of(old or obj):
            self.dependents[owner].discard(key)
        if gone:
            self.uids.pop(uid, None)
            self.suspects |= self.dependents[uid] | {self.uids[owner] for owner in owners if owner in self.uids}
            return
        self.uids[uid] = key
        for owner in owners:
            self.dependents[owner].add(key)
        if "deletionTimestamp" in obj["metadata"] or owners - self.uids.keys():
            self.suspects.add(key)

    def collect_garbage(self) -> None:
        """In the background: deletes what no owner is left for."""
        while not self.stopping.wait(0.02):
            with self.changed:
                self.changed.wait_for(lambda: self.stopping.is_set() or self.collect and self.suspects, 0.5)
                while self.collect and self.suspects:
                    plural, *key = self.suspects.pop()
                    if obj := self.objects[plural].get(tuple(key)):
                        self.judge(Request("DELETE", "", "garbage collector", kind=self.resources[plural]), obj)

    def judge(self, request: Request, obj: dict) -> None:
        """Deletes an object that has lost its owners; finishes a deletion that waits for dependents."""
        meta, finalizers, owners = obj["metadata"], obj["metadata"].get("finalizers", []), owners_of(obj)
        waiting = {"orphan", "foregroundDeletion"} & set(finalizers)
        if waiting and "deletionTimestamp" in meta:
            for plural, *key in list(self.dependents[meta["uid"]]):
                child, about = self.objects[plural][tuple(key)], Request("PATCH", "", request.user, kind=self.resources[plural])
                if "orphan" in waiting:
                    self.commit(about, "MODIFIED", without_owners(child, {meta["uid"]}), child)
                else:
                    self.remove(about, child)
            if not self.dependents[meta["uid"]]:
                left = [finalizer for finalizer in finalizers if finalizer not in waiting]
                self.commit(request, "MODIFIED" if left else "DELETED", {**obj, "metadata": {**meta, "finalizers": left}}, obj)
        elif owners and not owners & self.uids.keys():
            self.remove(request, obj)
        elif gone := owners - self.uids.keys():
            self.commit(request, "MODIFIED", without_owners(obj, gone), obj)

    # -- reviews and discovery

    def review(self, spec: dict) -> dict:
        """The status of a TokenReview or of a SubjectAccessReview."""
        if "token" in spec:
            user = self.tokens.get(spec["token"])
            name = {"username": self.USERS.get(user, user), "uid": user, "groups": ["system:authenticated"]}
            return {"authenticated": True, "user": name} if user else {"user": {}, "error": "invalid bearer token"}
        names, what = {name: user for user, name in self.USERS.items()}, spec.get("resourceAttributes") or spec.get("nonResourceAttributes") or {}
        resource = "/".join(filter(None, (what.get("resource"), what.get("subresource"))))
        return {"allowed": self.allowed(names.get(spec.get("user"), spec.get("user", "")), what.get("verb", ""), what.get("group", ""), resource,
                                        what.get("namespace", ""), what.get("name", ""), what.get("path", ""))}

    def discover(self, path: str) -> Any:
        """What kubectl asks in order to learn what there is."""
        kinds = list(self.resources.values())
        groups = [{"name": group, "versions": (versions := [{"groupVersion": f"{group}/v1", "version": "v1"}]), "preferredVersion": versions[0]}
                  for group in dict.fromkeys(kind.group for kind in kinds if kind.group)]
        answers = {"/readyz": "ok", "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.0+test-sked"},
                   "/api": {"kind": "APIVersions", "versions": ["v1"]}, "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
                   "/openapi/v3": {"paths": {kind.root[1:]: {"serverRelativeURL": f"/openapi/v3{kind.root}"} for kind in kinds}}}
        here = [kind for kind in kinds if kind.root == path.removeprefix("/openapi/v3")]
        if path in answers:
            return answers[path]
        if not here:
            raise Refusal(404, "", "404 page not found\n")
        if path.startswith("/openapi"):
            return openapi(here)
        verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
        rows = [{"name": kind.plural, "singularName": kind.kind.lower(), "namespaced": kind.namespaced, "kind": kind.kind, "shortNames": kind.short,
                 "categories": kind.categories, "verbs": verbs[:1] if kind.plural in REVIEWS else verbs} for kind in here]
        rows += [{"name": f"{kind.plural}/status", "namespaced": kind.namespaced, "kind": kind.kind, "verbs": ["get", "patch", "update"]}
                 for kind in here if kind.status]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": here[0].api_version, "resources": rows}


def owners_of(obj: dict) -> set[str]:
    return {owner["uid"] for owner in obj["metadata"].get("ownerReferences", [])}


def without_owners(obj: dict, uids: set[str]) -> dict:
    """The object without its references to these owners."""
    owners = [owner for owner in obj["metadata"]["ownerReferences"] if owner["uid"] not in uids]
    meta = {key: value for key, value in obj["metadata"].items() if key != "ownerReferences"}
    return {**obj, "metadata": meta | ({"ownerReferences": owners} if owners else {})}


def openapi(kinds: list[Resource]) -> dict:
    """As much OpenAPI as kubectl needs to apply anything, and to explain a custom resource."""
    paths, schemas = {}, {}
    for kind in kinds:
        names = {"group": kind.group, "version": "v1", "kind": kind.kind}
        parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("fieldValidation", "dryRun")]
        paths[kind.path("{namespace}", "{name}")] = {"patch": {"parameters": parameters, "responses": {}, "x-kubernetes-group-version-kind": names}}
        schema = kind.custom.get("schema", {}).get("openAPIV3Schema", {"type": "object"})
        schemas[kind.kind] = {**schema, "x-kubernetes-group-version-kind": [names]}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1"}, "paths": paths, "components": {"schemas": schemas}}


def kubeconfig_of(cluster: dict, user: str, token: str = "") -> dict:
    return {"apiVersion": "v1", "kind": "Config", "current-context": user, "clusters": [{"name": "sked", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token or user}}], "contexts": [{"name": user, "context": {"cluster": "sked", "user": user}}]}


class ApiHandler(http.server.BaseHTTPRequestHandler):
    """HTTP for an ApiServer, and the place where faults happen."""

    api: ApiServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body in one packet

    def setup(self) -> None:
        super().setup()
        self.api.connections.add(self.connection)

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone, or drop_connections has cut it off
            super().handle()
        self.api.connections.discard(self.connection)

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()

    def respond(self) -> None:
        """Does what is asked and answers it, unless a fault comes in between."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.api.next_fault(self.command, self.path)
        action = fault.action if fault else ""
        if self.api.delay:
            time.sleep(self.api.delay)
        self.api.thawed.wait()
        if action == "hang":
            fault.over.wait()
        status, content, headers = self.misbehave(fault) if action in ("hang", "drop", "error", "garbage") else self.obey(body)
        self.api.thawed.wait()
        if action in ("hang", "drop", "lose"):
            self.close_connection = True
        elif isinstance(content, Iterator):
            self.stream(content, fault)
        else:
            self.answer(status, content, headers, fault if action in ("truncate", "stall") else None)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = respond

    def misbehave(self, fault: Fault) -> tuple[int, Any, dict[str, str]]:
        """The answer that a fault gives to what is not done at all."""
        request = self.api.parse(self.command, self.path, self.api.tokens.get(self.token, ""))
        request.status = {"error": fault.status, "garbage": 200}.get(fault.action, 0)
        self.api.requests.append(request)
        content = fault.body if fault.body is not None else Refusal(fault.status, "InternalError", "a fault").status
        return request.status, "<html>this is not JSON</html>" if fault.action == "garbage" else content, fault.headers

    def obey(self, body: bytes) -> tuple[int, Any, dict[str, str]]:
        try:
            request = self.api.parse(self.command, self.path, self.api.authenticate(self.token), self.headers.get("Accept", ""))
            content = self.api.serve(request, body, self.headers.get("Content-Type", ""))
            return request.status, content, {"Warning": ", ".join(f"299 - {json.dumps(text)}" for text in request.warnings)}
        except Refusal as refusal:
            seconds = refusal.details.get("retryAfterSeconds", "")
            return refusal.code, refusal.status if refusal.status["reason"] else str(refusal), {"Retry-After": str(seconds)}

    @property
    def token(self) -> str:
        return re.sub("^bearer +", "", self.headers.get("Authorization", ""), flags=re.IGNORECASE)

    def answer(self, status: int, content: Any, headers: dict[str, str], fault: Fault | None) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.start(status, "text/plain" if isinstance(content, str) else "application/json", **{"Content-Length": str(len(data)), **headers})
        self.send(data if self.command != "HEAD" else b"", fault)

    def stream(self, events: Iterator[dict | None], fault: Fault | None) -> None:
        """The events of a watch, one a line and a chunk; a fault strikes in the middle of the first one."""
        self.start(200, "application/json", **{"Transfer-Encoding": "chunked"})
        for event in events:
            self.api.thawed.wait()
            if event is None:
                self.wfile.flush()
                if not self.api.tls and select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                    raise ConnectionResetError("nobody listens any more")
            elif not self.close_connection:
                line = json.dumps(event).encode() + b"\n"
                self.send(b"%x\r\n%s\r\n" % (len(line), line), fault)
        self.send(b"" if self.close_connection else b"0\r\n\r\n", None)

    def start(self, status: int, content_type: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": content_type, **headers}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()

    def send(self, data: bytes, fault: Fault | None) -> None:
        """Sends it, or half of it and then silence or the end."""
        self.wfile.write(data[:len(data) // 2] if fault else data)
        self.wfile.flush()
        if fault:
            self.close_connection = True
            if fault.action == "stall":
                fault.over.wait()
            raise ConnectionAbortedError("a fault")

    def log_message(self, *_: Any) -> None:
        pass


# ---------------------------------------------------------------- nodes


def fits(pod: dict, node: dict, running: bool = False) -> bool:
    """Whether a pod belongs on a node; one that runs there already minds fewer taints."""
    labels, taints = node["metadata"].get("labels", {}), node["spec"].get("taints", [])
    terms = dig(pod, ".affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms")

    def holds(requirement: dict) -> bool:
        key, values = requirement["key"], requirement.get("values", [])
        return {"In": labels.get(key) in values, "NotIn": labels.get(key) not in values,
                "Exists": key in labels, "DoesNotExist": key not in labels}[requirement["operator"]]

    def tolerated(taint: dict) -> bool:
        return any(toleration.get("key") in (None, taint["key"]) and toleration.get("effect") in (None, taint["effect"])
                   and (toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", ""))
                   for toleration in pod.get("tolerations", []))

    return (pod.get("nodeSelector", {}).items() <= labels.items()
            and (terms is None or any(all(map(holds, term.get("matchExpressions", []))) for term in terms))
            and all(tolerated(taint) for taint in taints if taint["effect"] in (("NoExecute",) if running else ("NoExecute", "NoSchedule"))))


class Kubelets:
    """Plays the DaemonSet controller, the scheduler and the kubelets on an ApiServer.

    A pod runs and is ready, except that an image with the tag nopull cannot be pulled, one with the tag crash crash-loops, and so does every
    further scheduler on a node: as on a real kernel, the first one holds it until it is gone. Change the attributes to change the world.
    """

    def __init__(self, server: ApiServer, nodes: int = 0) -> None:
        self.server = server
        self.admit = True  # False: Pod Security refuses the pods
        self.exclusive = True  # False: a node takes any number of schedulers
        self.unschedulable: set[str] = set()  # nodes for which the scheduler finds no room
        self.start_seconds, self.stop_seconds = 0.05, 0.05
        self.up_seconds, self.backoff_seconds, self.most_seconds, self.waiting_seconds = 2.0, 4.0, 15.0, 1.0  # of a crash loop
        self.started_ago = 0.0  # containers claim to have started this much earlier, so that they count as settled
        self.holders: dict[str, str] = {}  # the uid of the pod whose scheduler is attached, by node
        self.by_hand: set[str] = set()  # uids of pods that set_state has taken over
        self.timers: list[tuple[float, str, str, int]] = []  # (when, namespace, pod, step of its life; -1 is its end)
        self.dirty: dict[tuple[str, str], None] = {}
        server.graceful = True
        for i in range(nodes):
            self.add_node(f"node-{i + 1}")
        threading.Thread(target=self.run, name="kubelets", daemon=True).start()

    def add_node(self, name: str, labels: dict[str, str] | None = None, taints: list[dict] | None = None) -> dict:
        return self.server.create({"apiVersion": "v1", "kind": "Node", "spec": {"taints": taints or []}, "metadata": {
            "name": name, "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})}}, "status": {
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}], "nodeInfo": {"kernelVersion": "6.12.0"}}}, user="kubelets")

    def remove_node(self, name: str) -> None:
        self.server.delete("nodes", "", name, user="kubelets")

    def pods(self, daemonset: str, namespace: str = "default") -> dict[str, dict]:
        """The pods of a DaemonSet by the name of their node."""
        return {node_of(pod): pod for pod in self.server.list("pods", namespace) if dig(pod, ".metadata.ownerReferences[0].name") == daemonset}

    def set_state(self, pod: dict, state: dict, last_state: dict | None = None, restarts: int = 0, ready: bool | None = None) -> dict:
        """Sets the state of a pod's container by hand; its life goes no further by itself."""
        self.by_hand.add(pod["metadata"]["uid"])
        return self.report(pod, state, last_state or {}, restarts, "running" in state if ready is None else ready)

    # -- how it works

    def run(self) -> None:
        server, seen = self.server, 0
        while not server.stopping.wait(0.02):
            with server.changed:
                wait = self.timers[0][0] - time.monotonic() if self.timers else 0.5
                server.changed.wait_for(lambda: server.version != seen or server.stopping.is_set(), max(0.0, min(0.5, wait)))
                kinds = ("nodes", "daemonsets", "pods")
                changes = [change for kind in kinds for change in server.changes(kind, seen)]
                if server.version < seen:  # a backup was restored: look at everything afresh
                    changes = [Change(0, "ADDED", obj, None) for kind in kinds for obj in server.objects[kind].values()]
                seen = server.version
            for change in changes:
                self.notice(change)
            while self.timers and self.timers[0][0] <= time.monotonic():
                self.live(*heapq.heappop(self.timers)[1:])
            for key in list(self.dirty):
                del self.dirty[key]
                with contextlib.suppress(Refusal):  # it has changed meanwhile, so there is another look
                    self.sync(*key)

    def after(self, seconds: float, namespace: str, name: str, step: int) -> None:
        heapq.heappush(self.timers, (time.monotonic() + seconds, namespace, name, step))

    def notice(self, change: Change) -> None:
        """Marks what a change makes necessary."""
        obj, meta = change.obj, change.obj["metadata"]
        if obj["kind"] == "Node":
            self.dirty |= dict.fromkeys(list(self.server.objects["daemonsets"]))
        elif obj["kind"] == "DaemonSet":
            self.dirty[meta["namespace"], meta["name"]] = None
        else:
            self.dirty |= {(meta["namespace"], owner["name"]): None for owner in meta.get("ownerReferences", [])}
            if change.type == "DELETED" and self.holders.get(node_of(obj)) == meta["uid"]:
                del self.holders[node_of(obj)]
            elif "deletionTimestamp" in meta:
                self.after(self.stop_seconds, meta["namespace"], meta["name"], -1)
            elif change.type == "ADDED" and not dig(obj, ".status.containerStatuses"):
                self.after(self.start_seconds, meta["namespace"], meta["name"], 0)

    def sync(self, namespace: str, name: str) -> None:
        """The DaemonSet controller's look at one DaemonSet."""
        with self.server.changed:
            daemonset = self.server.objects["daemonsets"].get((namespace, name))
            if not daemonset or "deletionTimestamp" in daemonset["metadata"]:
                return
            meta, spec, nodes = daemonset["metadata"], daemonset["spec"], dict(self.server.objects["nodes"])
            mine = [key for key in self.server.dependents[meta["uid"]] if key[0] == "pods"]
            pods = {node_of(pod): pod for pod in (self.server.objects["pods"][key[1:]] for key in mine)}
        template = spec["template"]
        revision = hashlib.sha1(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
        wanted = {node for (_, node), obj in nodes.items() if fits(template["spec"], obj, running=node in pods)}
        ready = {node: seconds_since(since) for node in wanted & pods.keys() if (since := ready_since(pods[node]))}
        available = {node for node, seconds in ready.items() if seconds >= spec.get("minReadySeconds", 0)}
        if ready.keys() - available:
            self.after(0.5, namespace, name, -2)
        updated = {node for node in wanted & pods.keys() if dig(pods[node], ".metadata.labels.controller-revision-hash") == revision}
        doomed = set(pods) - wanted
        if spec["updateStrategy"]["type"] == "RollingUpdate":
            most = spec["updateStrategy"]["rollingUpdate"]["maxUnavailable"]
            most = most if isinstance(most, int) else -(-int(most[:-1]) * len(wanted) // 100)
            old = sorted((wanted & pods.keys()) - updated)
            spare = max(0, most - len(wanted - available))
            doomed |= {node for node in old if node not in available} | set([node for node in old if node in available][:spare])
        for node in sorted(doomed):
            if "deletionTimestamp" not in pods[node]["metadata"]:
                path = BUILT_IN["pods"].path(namespace, pods[node]["metadata"]["name"])
                self.server.call("DELETE", path, {} if node in {name for _, name in nodes} else {"gracePeriodSeconds": 0}, user="kubelets")
        for node in sorted(wanted - pods.keys()):
            self.make_pod(daemonset, node, revision)
        status = {"observedGeneration": meta["generation"], "desiredNumberScheduled": len(wanted),
                  "currentNumberScheduled": len(wanted & pods.keys()), "numberMisscheduled": len(set(pods) - wanted),
                  "numberReady": len(ready), "updatedNumberScheduled": len(updated) or None,
                  "numberAvailable": len(available) or None, "numberUnavailable": len(wanted - available) or None}
        self.server.patch("daemonsets", namespace, name, {"status": status}, "status", user="kubelets")

    def make_pod(self, daemonset: dict, node: str, revision: str) -> None:
        """Creates the pod of a DaemonSet for one node, or says why not."""
        meta, template = daemonset["metadata"], daemonset["spec"]["template"]
        owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": meta["name"], "uid": meta["uid"]}
        if not self.admit:
            container = template["spec"]["containers"][0]["name"]
            message = (f'Error creating: pods "{meta["name"]}-" is forbidden: violates PodSecurity "baseline:latest": privileged '
                       f'(container "{container}" must not set securityContext.privileged=true)')
            if not any(event.get("message") == message for event in self.server.list("events", meta["namespace"])):
                self.server.create({"apiVersion": "v1", "kind": "Event", "type": "Warning", "reason": "FailedCreate", "message": message,
                                    "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
                                    "source": {"component": "daemonset-controller"},
                                    "involvedObject": {**owner, "namespace": meta["namespace"]}}, user="kubelets")
            return
        labels = {**template["metadata"]["labels"], "controller-revision-hash": revision,
                  "pod-template-generation": meta["annotations"]["deprecated.daemonset.template.generation"]}
        pinned = {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]}
        evictions = [{"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute"} for key in ("not-ready", "unreachable")]
        self.server.create({"apiVersion": "v1", "kind": "Pod", "metadata": {
            "generateName": f"{meta['name']}-", "namespace": meta["namespace"], "labels": labels,
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}]}, "spec": {
            **template["spec"], "tolerations": template["spec"].get("tolerations", []) + evictions,
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": pinned}}}}, user="kubelets")

    def live(self, namespace: str, name: str, step: int) -> None:
        """One step in the life of a pod: it is bound and started, it crashes, waits and starts again, or it ends."""
        if step == -2:
            self.dirty[namespace, name] = None
            return
        pod = self.server.get("pods", namespace, name)
        if not pod or step >= 0 and (pod["metadata"]["uid"] in self.by_hand or "deletionTimestamp" in pod["metadata"]
                                     or ("", node_of(pod)) not in self.server.objects["nodes"]):
            return
        with contextlib.suppress(Refusal):  # gone in this moment
            if step < 0:
                self.server.delete("pods", namespace, name, user="kubelets")
            elif node_of(pod) in self.unschedulable:
                self.server.patch("pods", namespace, name, {"status": {"phase": "Pending", "conditions": [{
                    "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": now(),
                    "message": f"0/{len(self.server.objects['nodes'])} nodes are available: 1 Insufficient memory."}]}}, "status", user="kubelets")
                self.after(0.5, namespace, name, step)
            else:
                if "nodeName" not in pod["spec"]:
                    pod = self.server.patch("pods", namespace, name, {"spec": {"nodeName": node_of(pod)}}, user="kubelets")
                state, last, ready, seconds = self.container(pod, step)
                self.report(pod, state, last, step // 3, ready)
                if seconds is not None:
                    self.after(seconds, namespace, name, step + 1)

    def container(self, pod: dict, step: int) -> tuple[dict, dict, bool, float | None]:
        """(state, lastState, ready, seconds until the next step) of a pod's container at a step of its life."""
        container, uid, restarts = pod["spec"]["containers"][0], pod["metadata"]["uid"], step // 3
        image, running = container["image"], {"running": {"startedAt": now(self.started_ago)}}
        tag = image.rpartition(":")[2]
        if tag == "nopull":
            return {"waiting": {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}": not found'}}, {}, False, None
        scheduler = dig(pod, ".metadata.labels.managed-by") == "sked-controller" and self.exclusive
        words = "verifier rejected the program" if tag == "crash" else "cannot attach: Device or resource busy"
        died = {"terminated": {"exitCode": 1, "reason": "Error", "startedAt": now(self.up_seconds), "finishedAt": now()}}
        if container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            died["terminated"]["message"] = words
        last = died if restarts else {}
        if tag != "crash" and step % 3 == 0 and (not scheduler or self.holders.setdefault(node_of(pod), uid) == uid):
            return running, last, True, None
        self.server.logs[uid] = words + "\n"
        if step % 3 == 0:
            return {"running": {"startedAt": now()}}, last, True, self.up_seconds
        if step % 3 == 1:
            return died, last, False, min(self.backoff_seconds * 2 ** restarts, self.most_seconds)
        message = f"back-off 10s restarting failed container={container['name']} pod={pod['metadata']['name']}"
        return {"waiting": {"reason": "CrashLoopBackOff", "message": message}}, died, False, self.waiting_seconds

    def report(self, pod: dict, state: dict, last: dict, restarts: int, ready: bool) -> dict:
        """Writes the status of a pod, as its kubelet does."""
        meta, container = pod["metadata"], pod["spec"]["containers"][0]
        conditions = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
        status = {"phase": "Pending" if "waiting" in state and not restarts and not last else "Running", "startTime": meta["creationTimestamp"],
                  "conditions": [{"type": name, "status": str(value), "lastTransitionTime": now(self.started_ago)}
                                 for name, value in conditions.items()],
                  "containerStatuses": [{"name": container["name"], "image": container["image"], "imageID": "", "restartCount": restarts,
                                         "ready": ready, "started": ready, "state": state, "lastState": last}]}
        return self.server.call("PUT", BUILT_IN["pods"].path(meta["namespace"], meta["name"], "status"), {"status": status}, user="kubelets")


def node_of(pod: dict) -> str:
    """The node that a pod is on or, as a DaemonSet's pods say from the start, for."""
    terms = ".affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchFields[0].values[0]"
    return pod["spec"].get("nodeName") or dig(pod["spec"], terms) or ""


def ready_since(pod: dict) -> str | None:
    """Since when a pod is ready, if it is and is there to stay."""
    ready = dig(pod, '.status.conditions[?(@.type=="Ready")]') or {}
    return ready.get("lastTransitionTime") if ready.get("status") == "True" and "deletionTimestamp" not in pod["metadata"] else None


# ---------------------------------------------------------------- the cluster and the operator of the end-to-end tests


class Cluster(Client):
    """An ApiServer or, without one, the cluster that $SKED_TEST_KUBECONFIG names: over HTTP, as its admin."""

    def __init__(self, server: ApiServer | None = None) -> None:
        from kubernetes import config
        path = server.kubeconfig("admin") if server else os.environ["SKED_TEST_KUBECONFIG"]
        self.server, self.api, self.namespaces = server, config.new_client_from_config(str(path)), []
        self.resources = server.resources if server else BUILT_IN | {"schedexts": Resource("schedexts", "SchedExt", "sked.schedkit.io")}

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix="sked-"))
        return self

    def __exit__(self, *_: Any) -> None:
        for name in self.namespaces:
            self.delete("namespaces", "", name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json", **_: str) -> Any:
        settings = self.api.configuration
        headers = {"Content-Type": content_type, **{auth["key"]: auth["value"] for auth in settings.auth_settings().values()}}
        response = self.api.rest_client.pool_manager.request(method, settings.host + path, headers=headers, timeout=30,
                                                             body=json.dumps(body) if body is not None else None)
        answer = json.loads(response.data) if "json" in response.headers["Content-Type"] else {"message": response.data.decode()}
        if response.status >= 400:
            raise Refusal(response.status, answer.get("reason", ""), answer["message"], **answer.get("details", {}))
        return answer

    def wait(self, condition: Callable[[], Any], seconds: float = 30.0) -> Any:
        return eventually(condition, seconds)

    def namespace(self) -> str:
        """A new namespace, which is deleted in the end."""
        self.namespaces.append(f"sked-test-{uuid.uuid4().hex[:8]}")
        labels = {"pod-security.kubernetes.io/enforce": "privileged"}
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespaces[-1], "labels": labels}})
        return self.namespaces[-1]

    def operator_kubeconfig(self) -> Path:
        """A kubeconfig with the rights of the operator's service account, for which install.yaml is applied, all but its Deployment."""
        if self.server:
            return self.server.kubeconfig("sked")
        for obj in manifests(HERE / "install.yaml"):
            if obj["kind"] in ("Namespace", "CustomResourceDefinition", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"):
                try:
                    self.create(obj)
                except Refusal as refusal:
                    if refusal.code != 409:
                        raise
                    kind = next(kind for kind in BUILT_IN.values() if kind.kind == obj["kind"])
                    self.patch(kind.plural, obj["metadata"].get("namespace", ""), obj["metadata"]["name"], obj)
        eventually(lambda: self.get("schedexts", "default", ""), 30)  # that is, the list
        path = BUILT_IN["serviceaccounts"].path("sked-system", "sked-controller-manager", "token")
        token = self.call("POST", path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 7200}})
        settings = self.api.configuration
        cluster = {"server": settings.host, **({"certificate-authority": settings.ssl_ca_cert} if settings.ssl_ca_cert else {}),
                   "insecure-skip-tls-verify": not settings.verify_ssl}
        kubeconfig = self.folder / "sked.kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(kubeconfig_of(cluster, "sked", token["status"]["token"])))
        return kubeconfig


class OperatorProcess:
    """sked.py in a process of its own; its log is in lines."""

    def __init__(self, kubeconfig: Path | str, *args: str) -> None:
        self.process = subprocess.Popen([sys.executable, str(HERE / "sked.py"), f"--kubeconfig={kubeconfig}", "--health-probe-bind-address=0", *args],
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=lambda: [self.lines.append(line) for line in self.process.stdout], daemon=True)
        self.reader.start()

    def __enter__(self) -> OperatorProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def stop(self, sent: int = signal.SIGTERM, seconds: float = 10.0) -> int:
        """Sends a signal and returns the exit code."""
        self.process.send_signal(sent)
        code = self.process.wait(seconds)
        self.reader.join(1)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGKILL)

    def usage(self) -> tuple[float, float]:
        """Seconds of CPU so far, and MiB resident."""
        times = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        memory = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"), int(memory[1]) / 1024


def schedext(name: str, sched: str = "ghcr.io/schedkit/scheds/scx_rusty:latest", namespace: str = "default", **spec: Any) -> dict:
    return {"apiVersion": "sked.schedkit.io/v1", "kind": "SchedExt", "metadata": {"name": name, "namespace": namespace},
            "spec": {"sched": sched, **spec}}


# ---------------------------------------------------------------- fixtures


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster of its own for each test; the real one where $SKED_TEST_KUBECONFIG names it."""
    with contextlib.ExitStack() as stack:
        server = None if os.environ.get("SKED_TEST_KUBECONFIG") else stack.enter_context(ApiServer())
        yield stack.enter_context(Cluster(server))


@pytest.fixture
def server(cluster: Cluster) -> ApiServer:
    """For tests that play with the API server or the nodes."""
    if not cluster.server:
        pytest.skip("cannot be done to a real cluster")
    return cluster.server


@pytest.fixture
def kubelets(server: ApiServer) -> Kubelets:
    return Kubelets(server)


@pytest.fixture
def start(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., sked.Operator]]:
    """Starts an operator in this process, with the rights of its service account; times are shorter than in life."""
    monkeypatch.setattr(sked, "GATHER_SECONDS", 0.1)
    monkeypatch.setattr(sked, "SETTLE_SECONDS", 1.0)
    monkeypatch.setattr(sked, "NAME_TAKEN_SECONDS", 0.5)
    monkeypatch.setattr(sked, "backoff", lambda failures, most: min(most, 0.1 * failures))
    kubeconfig, operators = str(cluster.operator_kubeconfig()), []

    def begin(namespace: str = "") -> sked.Operator:
        operator = sked.Operator(sked.Api(lambda: sked.load_configuration(kubeconfig, None)), namespace)
        operators.append((operator, threading.Thread(target=operator.run)))
        operators[-1][1].start()
        eventually(operator.ready)
        return operator
    yield begin
    for operator, thread in operators:
        operator.stop.set()
        thread.join(5)


def finish(operator: sked.Operator) -> None:
    """Stops an operator and waits until it has ended."""
    operator.stop.set()
    eventually(lambda: not any(thread.is_alive() for thread in threading.enumerate() if thread.name.startswith("worker-")))


@pytest.fixture
def ns(cluster: Cluster) -> str:
    return cluster.namespace()


RUSTY, LAVD = "ghcr.io/schedkit/scheds/scx_rusty:latest", "ghcr.io/schedkit/scheds/scx_lavd:v1"


def daemonset(name: str, namespace: str, owner_uid: str | None = None, image: str = RUSTY) -> dict:
    """What the Go operator makes of a SchedExt; a Python literal on purpose, not what build_daemonset says."""
    owners = [{"apiVersion": "sked.schedkit.io/v1", "kind": "SchedExt", "name": name, "uid": owner_uid, "controller": True, "blockOwnerDeletion": True}]
    return {"apiVersion": "apps/v1", "kind": "DaemonSet",
            "metadata": {"name": name, "namespace": namespace, "labels": {"managed-by": "sked-controller"}, **({"ownerReferences": owners} if owner_uid else {})},
            "spec": {"selector": {"matchLabels": {"name": name}},
                     "template": {"metadata": {"labels": {"name": name, "managed-by": "sked-controller"}},
                                  "spec": {"containers": [{"name": "scx", "image": image, "securityContext": {"privileged": True}}]}}}}


def image_of(cluster: Any, namespace: str, name: str) -> str | None:
    return dig(cluster.get("daemonsets", namespace, name), ".spec.template.spec.containers[0].image")


def condition(cluster: Any, namespace: str, name: str) -> dict:
    return dig(cluster.get("schedexts", namespace, name), '.status.conditions[?(@.type=="Ready")]') or {}


def reason(cluster: Any, namespace: str, name: str) -> str | None:
    return condition(cluster, namespace, name).get("reason")


# ---------------------------------------------------------------- build_daemonset

GIVEN = {"metadata": {"name": "scx-rusty", "namespace": "tools", "uid": "u-1", "generation": 1}, "spec": {"sched": RUSTY}}


def given(**spec: Any) -> dict:
    return {**GIVEN, "spec": {"sched": RUSTY, **spec}}


def pod_spec(**spec: Any) -> dict:
    return sked.build_daemonset(given(**spec))["spec"]["template"]["spec"]


def test_a_plain_schedext_yields_exactly_the_go_operators_daemonset() -> None:
    before = copy(GIVEN)
    assert sked.build_daemonset(GIVEN) == daemonset("scx-rusty", "tools", "u-1")
    assert GIVEN == before


def test_a_manifest_that_was_never_applied_has_no_owner_and_no_namespace() -> None:
    built = sked.build_daemonset({"metadata": {"name": "x"}, "spec": {"sched": RUSTY}})
    assert built["metadata"] == {"name": "x", "labels": {"managed-by": "sked-controller"}}


POD = {"nodeSelector": {"pool": "latency"}, "tolerations": [{"operator": "Exists"}], "priorityClassName": "system-node-critical",
       "imagePullSecrets": [{"name": "regcred"}], "hostPID": True}
CONTAINER = {"imagePullPolicy": "IfNotPresent", "args": ["--verbose"], "env": [{"name": "A", "value": "1"}], "resources": {"limits": {"memory": "1Gi"}},
             "terminationMessagePolicy": "FallbackToLogsOnError"}
DAEMONSET = {"updateStrategy": {"type": "OnDelete"}, "minReadySeconds": 5}


@pytest.mark.parametrize("field", [*POD, *CONTAINER, *DAEMONSET])
def test_each_optional_field_arrives_where_it_belongs_and_nothing_else_changes(field: str) -> None:
    value = (POD | CONTAINER | DAEMONSET)[field]
    expected = daemonset("scx-rusty", "tools", "u-1")
    pod = expected["spec"]["template"]["spec"]
    (pod if field in POD else pod["containers"][0] if field in CONTAINER else expected["spec"])[field] = value
    assert sked.build_daemonset(given(**{field: value})) == expected


def test_host_paths_are_mounted_at_their_own_place() -> None:
    pod = pod_spec(hostPaths=["/sys/kernel/debug", "/run/x"])
    assert pod["volumes"] == [{"name": "host-0", "hostPath": {"path": "/sys/kernel/debug"}}, {"name": "host-1", "hostPath": {"path": "/run/x"}}]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "host-0", "mountPath": "/sys/kernel/debug"}, {"name": "host-1", "mountPath": "/run/x"}]


@pytest.mark.parametrize("spec, word", [(None, "spec.sched"), ("text", "spec.sched"), ({}, "spec.sched"), ({"sched": 5}, "spec.sched"), ({"sched": " "}, "spec.sched"),
                                        ({"sched": RUSTY, "hostPaths": "/sys"}, "hostPaths"), ({"sched": RUSTY, "hostPaths": [1]}, "hostPaths")])
def test_a_spec_that_makes_no_daemonset_is_refused_in_a_sentence(spec: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        sked.build_daemonset({"metadata": {"name": "x"}, "spec": spec})


def render(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, text: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code = sked.main(["--render", "-"])
    return code, *capsys.readouterr()


def test_render_prints_the_daemonsets_of_a_file_and_passes_over_other_kinds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    text = yaml.safe_dump_all([schedext("a", RUSTY), {"kind": "ConfigMap"}, schedext("b", LAVD, nodeSelector={"pool": "latency"})])
    code, out, err = render(monkeypatch, capsys, text)
    first, second = yaml.safe_load_all(out)
    assert code == 0 and "passed over a ConfigMap" in err
    assert (first["metadata"]["name"], second["metadata"]["name"]) == ("a", "b")
    assert "affinity" in first["spec"]["template"]["spec"] and "affinity" not in second["spec"]["template"]["spec"]


@pytest.mark.parametrize("text, word", [("kind: SchedExt\nmetadata: {name: x}", "spec.sched"), ("kind: SchedExt\nspec: {sched: x}", "metadata.name"),
                                        ("a: [", "expected"), ("kind: Pod", "no SchedExt"), ("", "no SchedExt")])
def test_render_refuses_what_it_cannot_render_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, text: str, word: str) -> None:
    code, out, err = render(monkeypatch, capsys, text)
    assert (code, out) == (1, "") and word in err and "Traceback" not in err


def test_render_needs_a_file_that_is_there(capsys: pytest.CaptureFixture) -> None:
    assert sked.main(["--render", "/nowhere/x.yaml"]) == 1
    assert "/nowhere/x.yaml" in capsys.readouterr().err


# ---------------------------------------------------------------- node pools


def others(*selectors: Any) -> list[dict]:
    return [given(nodeSelector=selector) for selector in selectors]


def terms(mine: dict, *selectors: dict) -> list[list[tuple]] | None:
    """The node affinity in short: a list of terms, each a list of (key, values that it must not have)."""
    affinity = sked.build_daemonset(given(nodeSelector=mine), others(*selectors))["spec"]["template"]["spec"].get("affinity")
    if affinity is None:
        return None
    found = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert all(expression["operator"] == "NotIn" for term in found for expression in term["matchExpressions"])
    return [[(expression["key"], expression["values"]) for expression in term["matchExpressions"]] for term in found]


@pytest.mark.parametrize("mine, winners, expected", [
    pytest.param({}, [], None, id="alone"),
    pytest.param({}, [{}], None, id="equal, both everywhere"),
    pytest.param({"a": "1"}, [{"a": "1"}], None, id="equal"),
    pytest.param({"a": "1"}, [{"b": "1"}], None, id="overlapping"),
    pytest.param({"a": "1"}, [{}], None, id="the other is wider"),
    pytest.param({"a": "1"}, [{"a": "2", "b": "1"}], None, id="another value"),
    pytest.param({}, [{"a b": "1"}, {"a": "b c"}, {"a": 1}, ["a"]], None, id="no labels, which no node can have"),
    pytest.param({}, [{"pool": "latency"}], [[("pool", ["latency"])]], id="one winner"),
    pytest.param({}, [{"pool": "b"}, {"pool": "a"}, {"pool": "a"}], [[("pool", ["a", "b"])]], id="several on one key share a list"),
    pytest.param({}, [{"a": "1"}, {"b": "2"}], [[("a", ["1"]), ("b", ["2"])]], id="on different keys"),
    pytest.param({}, [{"a": "1", "b": "2"}], [[("a", ["1"])], [("b", ["2"])]], id="two extra pairs make two terms"),
    pytest.param({"a": "1"}, [{"a": "1", "b": "2"}], [[("b", ["2"])]], id="only the extra pair counts"),
    pytest.param({}, [{"a": "1"}, {"a": "1", "b": "2"}], [[("a", ["1"])]], id="a winner of a winner adds nothing"),
    pytest.param({}, [{"a": "1", "b": "2"}, {"c": "3"}], [[("a", ["1"]), ("c", ["3"])], [("b", ["2"]), ("c", ["3"])]], id="both kinds"),
])
def test_a_schedext_yields_to_those_with_a_more_specific_selector(mine: dict, winners: list[dict], expected: Any) -> None:
    assert terms(mine, *winners) == expected


def test_the_order_of_schedexts_and_keys_changes_nothing() -> None:
    winners = [{"a": "1", "b": "2"}, {"b": "3"}, {"c": "1"}, {"d": "1", "e": "2", "a": "2"}]
    shuffled = [dict(reversed(list(winner.items()))) for winner in reversed(winners)]
    assert sked.build_daemonset(given(), others(*winners)) == sked.build_daemonset(given(), others(*shuffled))
    assert json.dumps(terms({}, *winners)) == json.dumps(terms({}, *shuffled))


def test_each_node_goes_to_exactly_the_most_specific_of_nested_selectors() -> None:
    selectors = [{}, {"a": "1"}, {"a": "2"}, {"a": "1", "b": "1"}, {"a": "1", "b": "1", "c": "1"}]
    built = [sked.build_daemonset(given(nodeSelector=selector), others(*selectors))["spec"]["template"]["spec"] for selector in selectors]
    for labels in (dict(zip("abc", values)) for values in itertools.product(("1", "2", "3"), repeat=3)):
        node = {"metadata": {"labels": labels}, "spec": {}}
        matching = [selector for selector in selectors if selector.items() <= labels.items()]
        placed = [selector for selector, pod in zip(selectors, built) if fits(pod, node)]
        assert placed == [max(matching, key=len)], labels


def test_a_hundred_terms_are_the_limit() -> None:
    pairs = [{f"k{n}": "x", f"l{n}": "x"} for n in range(7)]
    assert len(terms({}, *pairs[:6])) == 64
    with pytest.raises(ValueError, match="too many node pools"):
        terms({}, *pairs)
    assert len(terms({}, {f"k{n}": "x" for n in range(100)})) == 100
    with pytest.raises(ValueError, match="100"):
        terms({}, {f"k{n}": "x" for n in range(101)})


# ---------------------------------------------------------------- as wanted or not


def stored(changes: dict | None = None, **spec: Any) -> dict:
    """A DaemonSet as the API server would return it, with everything that it fills in, and then changed."""
    obj = copy(sked.build_daemonset(given(**spec)))
    obj["metadata"] |= {"uid": "d-1", "resourceVersion": "7", "generation": 1}
    default_daemonset(obj)
    return merge(obj, changes or {})


def patch_of(found: dict, **spec: Any) -> dict:
    return sked.daemonset_patch(sked.keep_daemonset(found), sked.build_daemonset(given(**spec)))


ALL_FIELDS = {**POD, **CONTAINER, **DAEMONSET, "hostPaths": ["/sys/kernel/debug"],
              "env": [{"name": "EMPTY", "value": ""}, {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                      {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}],
              "resources": {"limits": {"cpu": "0.5", "memory": "1024Mi"}, "requests": {"cpu": 1, "memory": "1e3"}}}


@pytest.mark.parametrize("spec", [{}, ALL_FIELDS, {"minReadySeconds": 0, "hostPID": False, "args": [], "nodeSelector": {}, "priorityClassName": ""},
                                  {"imagePullPolicy": "Always"}, {"terminationMessagePolicy": "File"}, {"updateStrategy": {"type": "RollingUpdate"}},
                                  {"updateStrategy": {"rollingUpdate": {"maxUnavailable": "25%"}}}, {"nodeSelector": {"node-role.kubernetes.io/worker": ""}},
                                  {"tolerations": [{"key": "a", "operator": "Exists", "tolerationSeconds": 0}]}],
                         ids=["plain", "all fields", "empty values", "pull policy as defaulted", "termination policy as defaulted", "strategy as defaulted",
                              "half a strategy", "empty label value", "zero seconds"])
def test_what_the_server_fills_in_is_no_difference(spec: dict) -> None:
    assert patch_of(stored(**spec), **spec) == {}


@pytest.mark.parametrize("changes, patch", [
    pytest.param({"metadata": {"labels": {"managed-by": None}}}, {"metadata": {"labels": {"managed-by": "sked-controller"}}}, id="label removed"),
    pytest.param({"metadata": {"labels": {"team": "x"}, "annotations": {"a": "b"}}}, {}, id="other metadata stays"),
    pytest.param({"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}}}, {}, id="rollout restart stays"),
    pytest.param({"spec": {"template": {"metadata": {"labels": {"x": "y"}}}}},
                 {"spec": {"template": {"metadata": {"labels": {"x": None, "name": "scx-rusty", "managed-by": "sked-controller"}}}}}, id="template label added"),
    pytest.param({"spec": {"template": {"spec": {"nodeSelector": {"a": ""}}}}}, {"spec": {"template": {"spec": {"nodeSelector": None}}}}, id="nodeSelector added"),
    pytest.param({"spec": {"template": {"spec": {"hostNetwork": True}}}}, {"spec": {"template": {"spec": {"hostNetwork": None}}}}, id="hostNetwork added"),
    pytest.param({"spec": {"template": {"spec": {"hostUsers": False}}}}, {"spec": {"template": {"spec": {"hostUsers": None}}}}, id="user namespace added"),
    pytest.param({"spec": {"template": {"spec": {"restartPolicy": "Never"}}}}, {"spec": {"template": {"spec": {"restartPolicy": None}}}}, id="default changed"),
    pytest.param({"spec": {"updateStrategy": {"type": "OnDelete"}}}, {"spec": {"updateStrategy": None}}, id="strategy changed"),
    pytest.param({"metadata": {"ownerReferences": None}}, {"metadata": {"ownerReferences": daemonset("scx-rusty", "tools", "u-1")["metadata"]["ownerReferences"]}},
                 id="owner removed"),
])
def test_drift_is_answered_by_the_smallest_patch(changes: dict, patch: dict) -> None:
    assert patch_of(stored(changes)) == patch


@pytest.mark.parametrize("container", [{"image": LAVD}, {"securityContext": {"privileged": False}}, {"imagePullPolicy": "Never"}, {"command": ["sh"]}],
                         ids=lambda change: next(iter(change)))
def test_a_changed_container_is_replaced(container: dict) -> None:
    found = stored()
    found["spec"]["template"]["spec"]["containers"][0] |= container
    assert patch_of(found) == {"spec": {"template": {"spec": {"containers": daemonset("scx-rusty", "tools", "u-1")["spec"]["template"]["spec"]["containers"]}}}}


@pytest.mark.parametrize("image, policy", [("x", "Always"), ("x:latest", "Always"), ("host:5000/x", "Always"), ("host:5000/x:v1", "IfNotPresent"), ("x:v1", "IfNotPresent"),
                                           ("x@sha256:" + "0" * 64, "IfNotPresent"), ("x:latest@sha256:" + "0" * 64, "Always")])
def test_the_default_pull_policy_is_the_api_servers(image: str, policy: str) -> None:
    assert sked.default_pull_policy(image) == policy


# ---------------------------------------------------------------- build_status

NOW, CLOCK = "2026-01-02T03:04:05Z", 1000.0
LONG_AGO = "2026-01-01T00:00:00Z"


def pod(node: str = "n1", settles: float = -1.0, reason: str = "", message: str = "", owner: str = "scx-rusty", revision: str = "1", started: str | None = LONG_AGO,
        image: str = RUSTY) -> sked.Pod:
    """A pod that settles so many seconds from now; None of them started: not up."""
    return sked.Pod(("tools", owner), f"{owner}-{node}", node, revision, image, started, CLOCK + settles if started else float("inf"), reason, message, False)


def seen(desired: int, updated: int | None = None, observed: int = 1, **spec: Any) -> dict:
    found = sked.keep_daemonset(stored(**spec))
    return found | {"revision": "1", "status": {"observedGeneration": observed, "desiredNumberScheduled": desired,
                                                 "updatedNumberScheduled": desired if updated is None else updated}}


def status(found: dict | None, pods: list[sked.Pod], before: dict | None = None, rivals: dict | None = None, refused: bool = False, blocked: Any = None) -> dict:
    return sked.build_status({**GIVEN, "status": before}, found, pods, rivals or {}, refused, blocked, NOW, CLOCK)


def before(status: str, reason: str, **more: Any) -> dict:
    return {"conditions": [{"type": "Ready", "status": status, "reason": reason, "message": "", "lastTransitionTime": LONG_AGO, "observedGeneration": 1, **more}]}


CRASH = {"settles": 5.0, "reason": "CrashLoopBackOff", "message": "exit code 1"}


@pytest.mark.parametrize("found, pods, reason, words", [
    pytest.param(seen(0, observed=0), [], "RollingOut", "waiting for the DaemonSet controller", id="not looked yet"),
    pytest.param(seen(0), [], "NoNodes", "kubectl get nodes", id="no nodes"),
    pytest.param(seen(2), [pod("n1"), pod("n2")], "AllReady", "running on 2 of 2 nodes", id="all ready"),
    pytest.param(seen(2), [pod("n1"), pod("n2", settles=3)], "RollingOut", "waiting to see them stay up for 10 s", id="one has not settled"),
    pytest.param(seen(2), [pod("n1"), pod("n2", started=None)], "RollingOut", "ready on 1 of 2 nodes", id="one is not up"),
    pytest.param(seen(2, updated=1), [pod("n1"), pod("n2")], "RollingOut", "updated on 1", id="the status says one is old"),
    pytest.param(seen(2), [pod("n1"), pod("n2", revision="0", image=LAVD)], "RollingOut", "ready on 2 of 2", id="the pods say one is old"),
    pytest.param(seen(2), [pod("n1"), pod("n2", revision="0")], "AllReady", "2 of 2", id="rolled back before it was replaced"),
    pytest.param(seen(2, updated=1, updateStrategy={"type": "OnDelete"}), [pod("n1"), pod("n2")], "RollingOut", "kubectl delete pod -n tools -l name=scx-rusty", id="OnDelete"),
    pytest.param(seen(2), [pod("n1"), pod("n2", **CRASH)], "NodesFailing", "failing on 1 of 2 nodes; n2: CrashLoopBackOff: exit code 1", id="one crashes"),
    pytest.param(seen(1), [pod("n1", settles=-1, reason="CrashLoopBackOff")], "AllReady", "1 of 1", id="one crashed and has settled"),
])
def test_the_reason_says_what_is_missing(found: dict, pods: list[sked.Pod], reason: str, words: str) -> None:
    ready = status(found, pods)["conditions"][0]
    assert (ready["reason"], ready["status"]) == (reason, "True" if reason == "AllReady" else "False")
    assert words in ready["message"]


def test_a_status_counts_nodes_and_lists_failures() -> None:
    assert status(seen(3, updated=2), [pod("n1"), pod("n2", **CRASH), pod("n3", settles=3)]) == {
        "observedGeneration": 1, "nodes": {"desired": 3, "ready": 1, "updated": 2, "failing": 1},
        "failures": [{"node": "n2", "pod": "scx-rusty-n2", "reason": "CrashLoopBackOff", "message": "exit code 1"}],
        "conditions": [{"type": "Ready", "status": "False", "reason": "NodesFailing", "observedGeneration": 1, "lastTransitionTime": NOW,
                        "message": "failing on 1 of 3 nodes; n2: CrashLoopBackOff: exit code 1"}]}


def test_ten_failures_are_listed_by_node_and_all_are_counted() -> None:
    nodes = [f"n{n:02}" for n in range(25)]
    found = status(seen(25), [pod(node, **CRASH) for node in reversed(nodes)])
    assert [failure["node"] for failure in found["failures"]] == nodes[:10]
    assert found["nodes"]["failing"] == 25


def test_a_crash_beside_another_schedexts_scheduler_is_already_attached() -> None:
    found = status(seen(2), [pod("n1", **CRASH), pod("n2", settles=5, reason="ImagePullBackOff")], rivals={"n1": "tools/scx-lavd", "n2": "tools/scx-lavd"})
    assert [failure["reason"] for failure in found["failures"]] == ["AlreadyAttached", "ImagePullBackOff"]
    assert "tools/scx-lavd" in found["failures"][0]["message"] and "exit code 1" in found["failures"][0]["message"]


def test_no_pods_for_long_means_that_they_are_refused() -> None:
    fresh, late = status(seen(4), []), status(seen(4), [], refused=True)
    assert fresh["conditions"][0]["reason"] == "RollingOut"
    assert late["conditions"][0]["reason"] == "NodesFailing" and late["nodes"]["failing"] == 4
    assert "kubectl label --overwrite namespace tools pod-security.kubernetes.io/enforce=privileged" in late["conditions"][0]["message"]


def test_what_blocks_the_daemonset_is_the_reason_and_the_counts_stay() -> None:
    found = status(seen(2), [pod("n1"), pod("n2")], blocked=sked.Blocked("Rejected", "the API server refused it", None))
    assert (found["conditions"][0]["reason"], found["conditions"][0]["message"]) == ("Rejected", "the API server refused it")
    assert found["nodes"]["ready"] == 2


@pytest.mark.parametrize("was, moved", [("True", False), ("False", True), ("Unknown", True)])
def test_the_transition_time_moves_only_with_the_status(was: str, moved: bool) -> None:
    ready = status(seen(1), [pod()], before(was, "Whatever"))["conditions"][0]
    assert ready["lastTransitionTime"] == (NOW if moved else LONG_AGO)


@pytest.mark.parametrize("broken", [{"conditions": "x"}, {"conditions": [5, {"foo": 1}]}, {"conditions": [{"type": "Ready", "status": "True"}]}, {"nodes": None}])
def test_a_broken_status_is_made_whole(broken: dict) -> None:
    assert status(seen(1), [pod()], broken) == status(seen(1), [pod()])


def test_other_peoples_conditions_are_kept() -> None:
    other = {"type": "Approved", "status": "True", "reason": "x", "message": "", "lastTransitionTime": LONG_AGO}
    found = status(seen(1), [pod()], {"conditions": [other, before("True", "AllReady")["conditions"][0]]})
    assert [c["type"] for c in found["conditions"]] == ["Approved", "Ready"] and found["conditions"][0] == other


# What is kept of a pod.


UP = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
BACKOFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}


def raw_pod(state: dict, last: dict | None = None, restarts: int = 0, ready: bool | None = None, **status: Any) -> dict:
    ready = "running" in state if ready is None else ready
    return {"metadata": {"name": "p", "namespace": "tools", "labels": {"pod-template-generation": "1"},
                         "ownerReferences": [{"kind": "DaemonSet", "name": "scx-rusty", "controller": True}]},
            "spec": {"nodeName": "n1", "containers": [{"name": "spy", "image": "spy"}, {"name": "scx", "image": RUSTY}]},
            "status": {"conditions": [{"type": "Ready", "status": str(ready)}],
                       "containerStatuses": [{"name": "spy", "state": UP}, {"name": "scx", "state": state, "lastState": last or {}, "restartCount": restarts}]} | status}


def died(code: int = 1, **more: Any) -> dict:
    return {"terminated": {"exitCode": code, "reason": "Error", **more}}


@pytest.mark.parametrize("obj, reason, words", [
    pytest.param(raw_pod({"waiting": {"reason": "ContainerCreating"}}), "", "", id="starting"),
    pytest.param(raw_pod(UP), "", "", id="up"),
    pytest.param(raw_pod({"waiting": {"reason": "ErrImagePull", "message": "not found"}}), "ErrImagePull", "not found", id="ErrImagePull"),
    pytest.param(raw_pod({"waiting": {"reason": "InvalidImageName", "message": "bad"}}), "InvalidImageName", "bad", id="InvalidImageName"),
    pytest.param(raw_pod({"waiting": {"reason": "ImagePullBackOff", "message": "gone"}}, died(), 3), "ImagePullBackOff", "gone", id="image gone after a crash"),
    pytest.param(raw_pod(died()), "CrashLoopBackOff", "exit code 1, 0 restarts; see 'kubectl logs -n tools p'", id="first crash"),
    pytest.param(raw_pod(died(), died(), 1), "CrashLoopBackOff", "exit code 1, 1 restart; see 'kubectl logs -n tools p --previous'", id="second crash"),
    pytest.param(raw_pod(BACKOFF, died(2), 7), "CrashLoopBackOff", "exit code 2, 7 restarts;", id="backing off"),
    pytest.param(raw_pod(UP, died(), 7), "CrashLoopBackOff", "exit code 1, 7 restarts;", id="up again"),
    pytest.param(raw_pod(BACKOFF), "CrashLoopBackOff", "exit code unknown", id="backing off, cause lost"),
    pytest.param(raw_pod(UP, None, 3), "CrashLoopBackOff", "exit code unknown, 3 restarts", id="up again, cause lost"),
    pytest.param(raw_pod(died(137, reason="OOMKilled")), "CrashLoopBackOff", "exit code 137 (OOMKilled), 0 restarts", id="out of memory"),
    pytest.param(raw_pod(died(message="cannot attach:\n Device or resource busy\n")), "CrashLoopBackOff", ": cannot attach: Device or resource busy; see", id="last words"),
    pytest.param(raw_pod({}, phase="Failed", reason="Evicted", message="disk pressure"), "Evicted", "disk pressure", id="evicted"),
    pytest.param(raw_pod({}, conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]), "Unschedulable", "0/3 nodes", id="unschedulable"),
])
def test_of_a_pod_its_problem_is_kept(obj: dict, reason: str, words: str) -> None:
    kept = sked.keep_pod(obj, None, True)
    assert kept.reason == reason and words in kept.message
    assert (kept.owner, kept.node) == (("tools", "scx-rusty"), "n1")


def test_a_pod_that_is_not_bound_says_which_node_it_is_for() -> None:
    obj = raw_pod({}) | {"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n7"]}]}]}}}}}
    assert sked.keep_pod(obj, None, True).node == "n7"


def test_a_crash_loop_is_one_failure_at_every_stage_of_a_try() -> None:
    stages = [raw_pod(died(), died(), 3), raw_pod(BACKOFF, died(), 3), raw_pod(UP, died(), 3)]
    kept = [sked.keep_pod(stage, None, True) for stage in stages]
    assert len({(p.reason, p.message) for p in kept}) == 1 and all(p.fails(time.monotonic()) for p in kept)


@pytest.mark.parametrize("started_ago, live, settles_in", [
    pytest.param(60, False, -50, id="up for a minute before sked came"), pytest.param(4, False, 6, id="up for 4 s before sked came"),
    pytest.param(-3600, False, 10, id="its clock is ahead"), pytest.param(3600, True, 10, id="seen to start, its clock is behind"),
    pytest.param(0, True, 10, id="seen to start")])
def test_a_pod_settles_after_ten_seconds_whatever_its_clock_says(started_ago: float, live: bool, settles_in: float) -> None:
    kept = sked.keep_pod(raw_pod({"running": {"startedAt": now(started_ago)}}), None, live)
    assert kept.settles_at - time.monotonic() == pytest.approx(settles_in, abs=1.5)


def test_another_look_at_a_pod_does_not_start_its_time_again() -> None:
    first = sked.keep_pod(raw_pod(UP), None, True)
    again = sked.keep_pod(raw_pod(UP), first._replace(settles_at=5.0), True)
    restarted = sked.keep_pod(raw_pod({"running": {"startedAt": "2026-01-01T00:00:09Z"}}, died(), 1), again, True)
    assert again.settles_at == 5.0 and restarted.settles_at > time.monotonic()


# ---------------------------------------------------------------- the cache


@pytest.fixture
def reflector(mocker: Any) -> sked.Reflector:
    """A cache that has listed up to version 98."""
    made = sked.Reflector(mocker.Mock(), "schedexts", "/x", lambda obj, old, live: obj, mocker.Mock(), lambda obj: (obj["group"],))
    made.version = "98"
    return made


def at(version: int, group: str = "a", name: str = "x") -> dict:
    return {"metadata": {"namespace": "tools", "name": name, "resourceVersion": str(version)}, "group": group}


def test_the_echo_of_a_write_wakes_nobody_and_an_older_event_undoes_nothing(reflector: sked.Reflector) -> None:
    reflector.store(at(101))
    for version in (100, 101):
        reflector.handle("MODIFIED", at(version))
    reflector.handle("DELETED", at(99))
    assert reflector.items == {("tools", "x"): at(101)} and not reflector.changed.called
    reflector.handle("MODIFIED", at(102, "b"))
    reflector.changed.assert_called_once_with(at(101), at(102, "b"))
    assert (reflector.select("a"), reflector.select("b")) == ([], [at(102, "b")])


def test_the_answer_to_a_write_brings_nothing_back_that_is_gone(reflector: sked.Reflector) -> None:
    reflector.handle("ADDED", at(99))
    reflector.handle("DELETED", at(101))
    assert reflector.store(at(100)) == at(100)
    assert reflector.items == {} and reflector.select("a") == []


# ---------------------------------------------------------------- the queue


def test_a_key_waits_once_and_is_due_at_the_earliest_time_asked_for() -> None:
    work = sked.WorkQueue()
    work.add(("a", "late"), 60)
    for after in (30, 0, 5):
        work.add(("a", "x"), after)
    assert work.get(1)[0] == ("a", "x")
    work.done(("a", "x"))
    assert work.get(0.05) is None


def test_a_key_is_never_worked_on_twice_at_a_time_and_not_lost() -> None:
    work = sked.WorkQueue()
    work.add(("a", "x"))
    key, _ = work.get(1)
    work.add(key)
    assert work.get(0.05) is None
    work.done(key)
    assert work.get(1)[0] == key


def test_a_key_that_is_due_later_comes_then(mocker: Any) -> None:
    clock = mocker.patch.object(sked.time, "monotonic", return_value=100.0)
    work = sked.WorkQueue()
    work.add(("a", "x"), 7)
    assert work.get(0) is None
    clock.return_value = 107.5
    assert work.get(0) == (("a", "x"), 0.5)


def test_a_failing_key_waits_longer_each_time_and_starts_afresh_after_a_success(mocker: Any) -> None:
    mocker.patch.object(sked.random, "uniform", return_value=1.0)
    assert [sked.backoff(n, 300) for n in (1, 2, 3, 9, 10, 500)] == [1, 2, 4, 256, 300, 300]
    work = sked.WorkQueue()
    assert [work.retry(("a", "x"), 0) for _ in range(3)] == [1, 2, 3]
    operator = mocker.Mock(spec=sked.Operator, queue=work, metrics=sked.Metrics(), reconcile=lambda key: float("inf"))
    work.busy.add(("a", "x"))
    sked.Operator.process(operator, ("a", "x"), 0.0)
    assert work.retry(("a", "x"), 0) == 1


# ---------------------------------------------------------------- end to end: a SchedExt and its DaemonSet


def test_a_schedext_is_created_edited_and_deleted(cluster: Cluster, ns: str, start: Callable) -> None:
    start()
    uid = cluster.create(schedext("x", RUSTY, ns))["metadata"]["uid"]
    made = eventually(lambda: cluster.get("daemonsets", ns, "x"))
    assert made["metadata"]["ownerReferences"] == daemonset("x", ns, uid)["metadata"]["ownerReferences"]
    cluster.patch("schedexts", ns, "x", {"spec": {"sched": LAVD}})
    eventually(lambda: image_of(cluster, ns, "x") == LAVD)
    cluster.delete("schedexts", ns, "x")
    eventually(lambda: not cluster.get("daemonsets", ns, "x"), 30)


def test_one_deleted_and_created_again_at_once_gets_a_daemonset_of_its_own(cluster: Cluster, ns: str, start: Callable) -> None:
    start()
    cluster.create(schedext("x", RUSTY, ns))
    old = eventually(lambda: cluster.get("daemonsets", ns, "x"))
    cluster.delete("schedexts", ns, "x")
    uid = cluster.create(schedext("x", LAVD, ns))["metadata"]["uid"]
    new = eventually(lambda: (found := cluster.get("daemonsets", ns, "x")) and found["metadata"]["uid"] != old["metadata"]["uid"] and found, 30)
    assert new["metadata"]["ownerReferences"][0]["uid"] == uid and new["spec"]["template"]["spec"]["containers"][0]["image"] == LAVD


def test_what_came_and_went_while_it_was_down_is_made_up_for(cluster: Cluster, ns: str, start: Callable) -> None:
    first = start()
    cluster.create(schedext("stays", RUSTY, ns))
    cluster.create(schedext("goes", RUSTY, ns))
    eventually(lambda: cluster.get("daemonsets", ns, "stays") and cluster.get("daemonsets", ns, "goes"))
    finish(first)
    cluster.delete("schedexts", ns, "goes")
    cluster.patch("schedexts", ns, "stays", {"spec": {"sched": LAVD}})
    cluster.create(schedext("comes", RUSTY, ns))
    eventually(lambda: not cluster.get("daemonsets", ns, "goes"), 30)
    start()
    eventually(lambda: cluster.get("daemonsets", ns, "comes") and image_of(cluster, ns, "stays") == LAVD)
    assert not cluster.get("daemonsets", ns, "goes")


SIDECAR = {"spec": {"template": {"spec": {"containers": [{"name": "scx", "image": RUSTY, "securityContext": {"privileged": True}}, {"name": "spy", "image": "spy"}]}}}}


@pytest.mark.parametrize("drift", [
    pytest.param({"spec": {"template": {"spec": {"containers": [{"name": "scx", "image": "evil"}]}}}}, id="image"),
    pytest.param(SIDECAR, id="sidecar"),
    pytest.param({"spec": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}}, id="nodeSelector"),
    pytest.param({"metadata": {"labels": {"managed-by": None}}}, id="label"),
    pytest.param({"metadata": {"ownerReferences": None}}, id="owner"),
    pytest.param({"spec": {"updateStrategy": {"type": "OnDelete"}}}, id="strategy"),
])
def test_drift_is_undone(cluster: Cluster, ns: str, start: Callable, drift: dict) -> None:
    start()
    cluster.create(schedext("x", RUSTY, ns))
    before = eventually(lambda: cluster.get("daemonsets", ns, "x"))
    ours = lambda obj: (obj["spec"], obj["metadata"].get("labels"), obj["metadata"].get("ownerReferences"))
    cluster.patch("daemonsets", ns, "x", drift)
    eventually(lambda: (found := cluster.get("daemonsets", ns, "x"))["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]
               and ours(found) == ours(before), 5)
    assert cluster.get("daemonsets", ns, "x")["metadata"]["uid"] == before["metadata"]["uid"]


def test_a_deleted_daemonset_is_made_again(cluster: Cluster, ns: str, start: Callable) -> None:
    start()
    cluster.create(schedext("x", RUSTY, ns))
    old = eventually(lambda: cluster.get("daemonsets", ns, "x"))
    cluster.delete("daemonsets", ns, "x")
    eventually(lambda: (found := cluster.get("daemonsets", ns, "x")) and found["metadata"]["uid"] != old["metadata"]["uid"], 5)


def test_a_rollout_restart_stays(cluster: Cluster, ns: str, start: Callable) -> None:
    start()
    cluster.create(schedext("x", RUSTY, ns))
    eventually(lambda: cluster.get("daemonsets", ns, "x"))
    cluster.patch("daemonsets", ns, "x", {"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}}})
    cluster.patch("schedexts", ns, "x", {"spec": {"sched": LAVD}})
    eventually(lambda: image_of(cluster, ns, "x") == LAVD)
    assert cluster.get("daemonsets", ns, "x")["spec"]["template"]["metadata"]["annotations"] == {"kubectl.kubernetes.io/restartedAt": "now"}


@pytest.mark.parametrize("foreign", [{"labels": {"app": "theirs"}}, {"labels": {"managed-by": "sked-controller"}, "ownerReferences": [
    {"apiVersion": "example.com/v1", "kind": "Other", "name": "o", "uid": "11111111-1111-1111-1111-111111111111", "controller": True}]}], ids=["no owner, no label", "another controller"])
def test_a_daemonset_that_is_not_ours_is_never_touched(cluster: Cluster, ns: str, start: Callable, foreign: dict) -> None:
    if cluster.server:
        cluster.server.collect = False
    theirs = daemonset("x", ns) | {"metadata": {"name": "x", "namespace": ns, **foreign}}
    version = cluster.create(theirs)["metadata"]["resourceVersion"]
    start()
    cluster.create(schedext("x", LAVD, ns))
    eventually(lambda: reason(cluster, ns, "x") == "NameTaken")
    assert "kubectl delete daemonset" in condition(cluster, ns, "x")["message"]
    found = cluster.get("daemonsets", ns, "x")
    assert found is None or found["spec"]["template"]["spec"]["containers"][0]["image"] == RUSTY and (not cluster.server or found["metadata"]["resourceVersion"] == version)
    cluster.delete("daemonsets", ns, "x")
    eventually(lambda: image_of(cluster, ns, "x") == LAVD, 5)


def test_an_orphan_with_another_selector_is_not_for_us(cluster: Cluster, ns: str, start: Callable) -> None:
    orphan = daemonset("x", ns)
    orphan["spec"]["selector"]["matchLabels"] = orphan["spec"]["template"]["metadata"]["labels"] = {"managed-by": "sked-controller", "a": "b"}
    cluster.create(orphan)
    start()
    cluster.create(schedext("x", RUSTY, ns))
    eventually(lambda: reason(cluster, ns, "x") == "NameTaken")


def test_looking_at_a_taken_name_again_writes_nothing(server: ApiServer, ns: str, start: Callable) -> None:
    server.create(daemonset("x", ns) | {"metadata": {"name": "x", "namespace": ns}})
    start()
    server.create(schedext("x", LAVD, ns))
    eventually(lambda: reason(server, ns, "x") == "NameTaken")
    since = eventually(lambda: not server.writes(time.time() - 0.3) and time.time())
    eventually(lambda: len([r for r in server.requests if r.time > since and r.verb == "get"]) >= 3)
    assert server.writes(since) == []


def test_an_orphan_of_ours_is_adopted_with_its_pods(cluster: Cluster, ns: str, start: Callable) -> None:
    orphan = cluster.create(daemonset("x", ns))
    start()
    uid = cluster.create(schedext("x", RUSTY, ns))["metadata"]["uid"]
    found = eventually(lambda: (found := cluster.get("daemonsets", ns, "x"))["metadata"].get("ownerReferences") and found)
    assert found["metadata"]["uid"] == orphan["metadata"]["uid"] and found["metadata"]["generation"] == 1
    assert found["metadata"]["ownerReferences"][0]["uid"] == uid


def test_the_go_operators_daemonset_is_taken_over_without_a_write(cluster: Cluster, ns: str, start: Callable) -> None:
    uid = cluster.create(schedext("x", RUSTY, ns))["metadata"]["uid"]
    made = cluster.create(daemonset("x", ns, uid))
    start()
    eventually(lambda: reason(cluster, ns, "x"))
    found = cluster.get("daemonsets", ns, "x")
    assert (found["metadata"]["uid"], found["metadata"]["generation"]) == (made["metadata"]["uid"], 1)
    if cluster.server:
        assert {r.what for r in cluster.server.writes()} == {"schedexts/status"}


def test_restarted_on_finished_work_it_writes_nothing(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable) -> None:
    kubelets.started_ago = 60
    kubelets.add_node("n1")
    first = start()
    server.create(schedext("plain", RUSTY, ns))
    server.create(schedext("full", LAVD, ns, **ALL_FIELDS))
    server.create(schedext("broken", "ghcr.io/x/y:crash", ns, nodeSelector={"kubernetes.io/os": "linux"}))
    eventually(lambda: reason(server, ns, "full") == "NoNodes" and reason(server, ns, "plain") and reason(server, ns, "broken") == "NodesFailing")
    kubelets.by_hand |= {p["metadata"]["uid"] for p in server.list("pods")}
    eventually(lambda: not server.writes(time.time() - 1.5))
    finish(first)
    since = time.time()
    second = start()
    eventually(lambda: not second.queue.due and sum(v for (m, _), v in second.metrics.counters.items() if m == "controller_runtime_reconcile_total") >= 3)
    assert server.writes(since) == []


def test_a_refused_daemonset_is_told_and_retried_and_stops_no_other(server: ApiServer, ns: str, start: Callable) -> None:
    words = 'daemonsets.apps "bad" is forbidden: exceeded quota'
    fault = server.fault("POST", f"{ns}/daemonsets", times=None, status=403, body={"kind": "Status", "code": 403, "message": words})
    start()
    server.create(schedext("bad", RUSTY, ns))
    eventually(lambda: reason(server, ns, "bad") == "Rejected")
    assert words in condition(server, ns, "bad")["message"]
    server.create(schedext("good", RUSTY, server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "elsewhere"}})["metadata"]["name"]))
    eventually(lambda: server.get("daemonsets", "elsewhere", "good"))
    fault.clear()
    eventually(lambda: server.get("daemonsets", ns, "bad") and reason(server, ns, "bad") != "Rejected")


def test_one_namespace_only(server: ApiServer, ns: str, start: Callable) -> None:
    start(ns)
    server.create(schedext("out", RUSTY, "default"))
    server.create(schedext("in", RUSTY, ns))
    eventually(lambda: server.get("daemonsets", ns, "in"))
    assert not server.get("daemonsets", "default", "out")
    assert {r.namespace for r in server.requests if r.user == "sked"} == {ns}


def test_a_schedext_that_is_being_deleted_is_left_alone(server: ApiServer, ns: str, start: Callable) -> None:
    held = schedext("x", RUSTY, ns)
    held["metadata"]["finalizers"] = ["example.com/hold"]
    server.create(held)
    start()
    eventually(lambda: server.get("daemonsets", ns, "x"))
    server.delete("schedexts", ns, "x", policy="Background")
    eventually(lambda: "deletionTimestamp" in server.get("schedexts", ns, "x")["metadata"])
    server.delete("daemonsets", ns, "x")
    server.create(schedext("y", RUSTY, ns))
    eventually(lambda: server.get("daemonsets", ns, "y"))
    assert not server.get("daemonsets", ns, "x")


def test_a_patch_never_hits_another_daemonset_that_took_the_name(server: ApiServer, ns: str, start: Callable) -> None:
    operator = start()
    server.create(schedext("x", RUSTY, ns))
    eventually(lambda: operator.daemonsets.items.get((ns, "x")))
    have, ext = operator.daemonsets.items[ns, "x"], operator.schedexts.items[ns, "x"]
    finish(operator)
    server.delete("daemonsets", ns, "x")
    version = server.create(daemonset("x", ns) | {"metadata": {"name": "x", "namespace": ns}})["metadata"]["resourceVersion"]
    with pytest.raises(sked.ApiError):
        operator.patch((ns, "x"), ext, have, sked.build_daemonset({**ext, "spec": {"sched": LAVD}}), f"/apis/apps/v1/namespaces/{ns}/daemonsets/x")
    assert server.get("daemonsets", ns, "x")["metadata"]["resourceVersion"] == version


def test_a_webhook_that_overrules_sked_is_not_fought(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    admit = server.admit

    def webhook(request: Request, obj: dict, old: dict | None) -> dict:
        if request.resource == "daemonsets" and not request.subresource:
            obj = merge(obj, {"spec": {"template": {"spec": {"priorityClassName": "theirs"}}}})
        return admit(request, obj, old)
    monkeypatch.setattr(server, "admit", webhook)
    start()
    server.create(schedext("x", RUSTY, ns))
    eventually(lambda: "overrules" in caplog.text)
    kubelets.add_node("n1")
    eventually(lambda: reason(server, ns, "x") == "AllReady")
    assert len([r for r in server.writes() if r.what == "daemonsets" and r.verb == "patch"]) == 1


# ---------------------------------------------------------------- end to end: what the status says


def history(server: ApiServer, namespace: str, name: str) -> list[dict]:
    """The Ready conditions that a SchedExt has ever had."""
    with server.changed:
        objs = [change.obj for change in server.log["schedexts"] if (change.obj["metadata"]["namespace"], change.obj["metadata"]["name"]) == (namespace, name)]
    return [ready for obj in objs if (ready := dig(obj, '.status.conditions[?(@.type=="Ready")]'))]


def failures(server: ApiServer, namespace: str, name: str) -> list[dict]:
    return dig(server.get("schedexts", namespace, name), ".status.failures") or []


def begin_ready(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable, *nodes: str) -> None:
    """Where most stories begin: sked runs, and so does the scheduler of SchedExt x on these nodes."""
    for node in nodes:
        kubelets.add_node(node)
    start()
    server.create(schedext("x", RUSTY, ns))
    eventually(lambda: reason(server, ns, "x") == "AllReady")


def test_ready_comes_when_every_pod_has_stayed_up_and_not_before(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable) -> None:
    for n in (1, 2, 3):
        kubelets.add_node(f"n{n}")
    start()
    server.create(schedext("x", RUSTY, ns))
    eventually(lambda: [ready_since(p) is not None for p in server.list("pods", ns)] == [True] * 3)
    up = time.monotonic()
    eventually(lambda: reason(server, ns, "x") == "AllReady")
    assert time.monotonic() - up >= 0.8
    assert server.get("schedexts", ns, "x")["status"]["nodes"] == {"desired": 3, "ready": 3, "updated": 3, "failing": 0}


def test_an_update_is_ready_only_when_the_new_image_runs_everywhere(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable) -> None:
    begin_ready(server, kubelets, ns, start, "n1", "n2")
    server.patch("schedexts", ns, "x", {"spec": {"sched": LAVD}})
    eventually(lambda: condition(server, ns, "x").get("observedGeneration") == 2 and reason(server, ns, "x") == "AllReady")
    assert {p["spec"]["containers"][0]["image"] for p in server.list("pods", ns)} == {LAVD}
    assert not [ready for ready in history(server, ns, "x") if ready["observedGeneration"] == 2 and ready["status"] == "True"][1:]


def test_a_rollback_in_the_middle_of_a_rollout_is_ready_again(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable) -> None:
    begin_ready(server, kubelets, ns, start, "n1", "n2")
    server.patch("schedexts", ns, "x", {"spec": {"sched": "ghcr.io/x/y:nopull"}})
    eventually(lambda: len(failures(server, ns, "x")) == 1)
    server.patch("schedexts", ns, "x", {"spec": {"sched": RUSTY}})
    eventually(lambda: condition(server, ns, "x")["observedGeneration"] == 3 and reason(server, ns, "x") == "AllReady")


def test_a_pod_that_is_slow_to_end_is_no_refusal(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable) -> None:
    begin_ready(server, kubelets, ns, start, "n1")
    kubelets.stop_seconds = 2.5
    server.patch("schedexts", ns, "x", {"spec": {"sched": LAVD}})
    eventually(lambda: condition(server, ns, "x")["observedGeneration"] == 2 and reason(server, ns, "x") == "AllReady")
    assert "NodesFailing" not in [ready["reason"] for ready in history(server, ns, "x")]


def test_a_crash_loop_is_one_steady_failure_and_never_ready(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable) -> None:
    kubelets.up_seconds, kubelets.backoff_seconds, kubelets.most_seconds, kubelets.waiting_seconds = 0.4, 0.3, 0.4, 0.2
    kubelets.add_node("n1")
    start()
    server.create(schedext("x", "ghcr.io/x/y:crash", ns, terminationMessagePolicy="FallbackToLogsOnError"))
    eventually(lambda: failures(server, ns, "x") and "3 restarts" in failures(server, ns, "x")[0]["message"])
    failure = failures(server, ns, "x")[0]
    assert (failure["node"], failure["reason"]) == ("n1", "CrashLoopBackOff")
    assert "verifier rejected the program" in failure["message"] and f"kubectl logs -n {ns} {failure['pod']} --previous" in failure["message"]
    reasons = [ready["reason"] for ready in history(server, ns, "x")]
    assert {ready["status"] for ready in history(server, ns, "x")} == {"False"}
    assert "RollingOut" not in reasons[reasons.index("NodesFailing"):]


@pytest.mark.parametrize("ending", ["fixed", "pod deleted", "node deleted"])
def test_a_failure_goes_away_when_it_does_on_the_node(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable, ending: str) -> None:
    kubelets.add_node("n1")
    start()
    server.create(schedext("x", "ghcr.io/x/y:nopull", ns))
    eventually(lambda: [f["reason"] for f in failures(server, ns, "x")] == ["ImagePullBackOff"])
    assert "not found" in condition(server, ns, "x")["message"]
    if ending == "fixed":
        server.patch("schedexts", ns, "x", {"spec": {"sched": RUSTY}})
    elif ending == "node deleted":
        kubelets.remove_node("n1")
    else:
        kubelets.admit = False
        (found,) = kubelets.pods("x", ns).values()
        server.delete("pods", ns, found["metadata"]["name"])
    eventually(lambda: not failures(server, ns, "x"))
    eventually(lambda: reason(server, ns, "x") == {"fixed": "AllReady", "node deleted": "NoNodes", "pod deleted": "NodesFailing"}[ending])


def test_pods_that_cannot_be_scheduled_say_why(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable) -> None:
    kubelets.unschedulable.add("n1")
    kubelets.add_node("n1")
    start()
    server.create(schedext("x", RUSTY, ns))
    failure = eventually(lambda: failures(server, ns, "x"))[0]
    assert (failure["node"], failure["reason"]) == ("n1", "Unschedulable") and "Insufficient memory" in failure["message"]
    kubelets.unschedulable.clear()
    eventually(lambda: reason(server, ns, "x") == "AllReady")


def test_pods_refused_at_admission_are_told(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable) -> None:
    kubelets.admit = False
    kubelets.add_node("n1")
    start()
    server.create(schedext("x", RUSTY, ns))
    eventually(lambda: reason(server, ns, "x") == "NodesFailing")
    assert f"kubectl label --overwrite namespace {ns}" in condition(server, ns, "x")["message"]
    kubelets.admit = True
    server.patch("nodes", "", "n1", {"metadata": {"labels": {"x": "y"}}})
    eventually(lambda: reason(server, ns, "x") == "AllReady")


def test_the_first_node_after_long_gets_its_time_before_its_pod_counts_as_refused(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable) -> None:
    kubelets.admit = False
    operator = start()
    server.create(schedext("x", RUSTY, ns))
    eventually(lambda: reason(server, ns, "x") == "NoNodes")
    written = time.monotonic()
    eventually(lambda: time.monotonic() > written + sked.SETTLE_SECONDS and not operator.queue.due)
    kubelets.add_node("n1")
    eventually(lambda: reason(server, ns, "x") == "NodesFailing")
    assert [key for key, _ in itertools.groupby(ready["reason"] for ready in history(server, ns, "x"))] == ["NoNodes", "RollingOut", "NodesFailing"]


def test_two_on_one_node_clash_and_the_loser_says_with_whom(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable) -> None:
    kubelets.up_seconds, kubelets.backoff_seconds, kubelets.most_seconds, kubelets.waiting_seconds = 0.4, 0.3, 0.4, 0.2
    kubelets.add_node("n1")
    start()
    server.create(schedext("first", RUSTY, ns))
    eventually(lambda: reason(server, ns, "first") == "AllReady")
    server.create(schedext("second", LAVD, ns))
    failure = eventually(lambda: [f for f in failures(server, ns, "second") if f["reason"] == "AlreadyAttached"])[0]
    assert f"{ns}/first" in failure["message"] and reason(server, ns, "first") == "AllReady"
    server.delete("schedexts", ns, "first")
    eventually(lambda: reason(server, ns, "second") == "AllReady", 15)


def test_a_rollout_writes_the_status_at_most_about_once_a_second(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    monkeypatch.setattr(sked, "GATHER_SECONDS", 0.5)
    for n in range(60):
        kubelets.add_node(f"n{n:02}")
    begun = time.monotonic()
    server.create(schedext("x", RUSTY, ns, updateStrategy={"rollingUpdate": {"maxUnavailable": 10}}))
    eventually(lambda: reason(server, ns, "x") == "AllReady", 20)
    server.patch("schedexts", ns, "x", {"spec": {"sched": LAVD}})
    eventually(lambda: condition(server, ns, "x").get("observedGeneration") == 2 and reason(server, ns, "x") == "AllReady", 20)
    written = [r for r in server.writes() if r.what == "schedexts/status"]
    assert len(written) <= (time.monotonic() - begun) / 0.5 + 1
    assert min(b.time - a.time for a, b in zip(written, written[1:])) >= 0.45
    assert server.get("schedexts", ns, "x")["status"]["nodes"] == {"desired": 60, "ready": 60, "updated": 60, "failing": 0}


def test_events_tell_what_was_done_and_each_failure_once(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable) -> None:
    kubelets.up_seconds, kubelets.backoff_seconds, kubelets.most_seconds, kubelets.waiting_seconds = 0.3, 0.2, 0.2, 0.1
    begin_ready(server, kubelets, ns, start, "n1")
    server.patch("schedexts", ns, "x", {"spec": {"sched": "ghcr.io/x/y:crash"}})
    eventually(lambda: failures(server, ns, "x") and "2 restarts" in failures(server, ns, "x")[0]["message"])
    about = lambda: [(e["type"], e["reason"]) for e in server.list("events", ns) if e["involvedObject"]["kind"] == "SchedExt"]
    eventually(lambda: len(about()) >= 3)
    assert sorted(about()) == [("Normal", "Created"), ("Normal", "Patched"), ("Warning", "NodesFailing")]


def test_events_that_cannot_be_sent_hold_nothing_up(server: ApiServer, ns: str, start: Callable) -> None:
    hang = server.fault("POST", "/events", times=None, action="hang")
    start()
    for n in range(5):
        server.create(schedext(f"x{n}", RUSTY, ns))
    eventually(lambda: len(server.list("daemonsets", ns)) == 5 and all(reason(server, ns, f"x{n}") for n in range(5)))
    hang.clear()


def test_someone_elses_condition_survives_a_write_at_the_same_time(server: ApiServer, ns: str, start: Callable) -> None:
    operator = start()
    server.create(schedext("x", RUSTY, ns))
    eventually(lambda: reason(server, ns, "x"))
    stale = operator.schedexts.items[ns, "x"]
    finish(operator)
    theirs = {"type": "Approved", "status": "True", "reason": "x", "message": "", "lastTransitionTime": now()}
    server.patch("schedexts", ns, "x", {"status": {"conditions": [theirs, condition(server, ns, "x")]}}, "status")
    operator.memory.clear()
    operator.write_status((ns, "x"), stale, sked.build_status(stale, None, [], {}, False, sked.Blocked("Rejected", "x", None), now(), 0.0))
    assert [c["type"] for c in server.get("schedexts", ns, "x")["status"]["conditions"]] == ["Approved", "Ready"]


# ---------------------------------------------------------------- end to end: placement


def placed(kubelets: Kubelets, namespaces: dict[str, str]) -> dict[str, list[str]]:
    """Which SchedExts have a pod on each node; {SchedExt: namespace}."""
    found: dict[str, list[str]] = {}
    for name, namespace in sorted(namespaces.items()):
        for node in kubelets.pods(name, namespace):
            found.setdefault(node, []).append(name)
    return found


@pytest.mark.parametrize("order", [["everywhere", "latency"], ["latency", "everywhere"]], ids=" then ".join)
def test_each_node_gets_exactly_one_scheduler(server: ApiServer, kubelets: Kubelets, ns: str, start: Callable, order: list[str]) -> None:
    elsewhere = server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "elsewhere"}})["metadata"]["name"]
    kubelets.add_node("plain")
    kubelets.add_node("fast", {"pool": "latency"})
    kubelets.add_node("batch", {"pool": "batch"})
    both = {"everywhere": schedext("everywhere", RUSTY, ns), "latency": schedext("latency", LAVD, elsewhere, nodeSelector={"pool": "latency"})}
    where = {"everywhere": ns, "latency": elsewhere}
    start()
    for name in order:
        server.create(both[name])
    eventually(lambda: placed(kubelets, where) == {"plain": ["everywhere"], "fast": ["latency"], "batch": ["everywhere"]})
    server.patch("schedexts", elsewhere, "latency", {"spec": {"nodeSelector": {"pool": "batch"}}})
    eventually(lambda: placed(kubelets, where) == {"plain": ["everywhere"], "fast": ["everywhere"], "batch": ["latency"]})
    server.delete("schedexts", elsewhere, "latency")
    eventually(lambda: placed(kubelets, where) == {"plain": ["everywhere"], "fast": ["everywhere"], "batch": ["everywhere"]})
    assert "affinity" not in server.get("daemonsets", ns, "everywhere")["spec"]["template"]["spec"]


def test_too_many_pools_leave_the_daemonset_as_it_is_and_are_told(server: ApiServer, ns: str, start: Callable) -> None:
    start()
    server.create(schedext("wide", RUSTY, ns))
    for n in range(6):
        server.create(schedext(f"pool-{n}", LAVD, ns, nodeSelector={f"k{n}": "x", f"l{n}": "x"}))
    found = lambda: dig(server.get("daemonsets", ns, "wide"), ".spec.template.spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms")
    eventually(lambda: len(found() or ()) == 64)
    server.create(schedext("pool-6", LAVD, ns, nodeSelector={"k6": "x", "l6": "x"}))
    eventually(lambda: reason(server, ns, "wide") == "Rejected")
    assert "too many node pools" in condition(server, ns, "wide")["message"] and len(found()) == 64
    server.delete("schedexts", ns, "pool-6")
    eventually(lambda: reason(server, ns, "wide") != "Rejected")


def test_a_change_touches_only_those_that_yield_to_it(server: ApiServer, ns: str, start: Callable) -> None:
    for n in range(100):
        server.create(schedext(f"pool-{n}", RUSTY, ns, nodeSelector={"pool": str(n)}))
    server.create(schedext("wide", RUSTY, ns, nodeSelector={"pool": "7"}))
    operator = start()
    eventually(lambda: len(server.list("daemonsets", ns)) == 101 and all(reason(server, ns, f"pool-{n}") for n in range(100)))
    eventually(lambda: not server.writes(time.time() - 0.5) and not operator.queue.due)
    reconciled = []
    reconcile = operator.reconcile
    operator.reconcile = lambda key: reconciled.append(key[1]) or reconcile(key)
    server.patch("schedexts", ns, "pool-3", {"spec": {"sched": LAVD}})
    eventually(lambda: image_of(server, ns, "pool-3") == LAVD)
    server.create(schedext("narrow", LAVD, ns, nodeSelector={"pool": "7", "zone": "a"}))
    eventually(lambda: all("affinity" in server.get("daemonsets", ns, name)["spec"]["template"]["spec"] for name in ("wide", "pool-7")))
    eventually(lambda: not operator.queue.due)
    assert set(reconciled) == {"pool-3", "narrow", "wide", "pool-7"}


@pytest.mark.parametrize("field, value, less", [
    *[pytest.param(field, value, None, id=f"{field}, whole") for field, value in ALL_FIELDS.items()],
    pytest.param("tolerations", [{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Exists"}], [{"key": "a", "operator": "Exists"}], id="tolerations, one item"),
    pytest.param("nodeSelector", {"a": "1", "b": ""}, {"a": "1", "b": None}, id="nodeSelector, one key"),
    pytest.param("resources", {"limits": {"cpu": "1", "memory": "1Gi"}}, {"limits": {"cpu": None}}, id="resources, one key"),
    pytest.param("hostPaths", ["/a", "/b"], ["/b"], id="hostPaths, one item"),
])
def test_what_the_user_takes_away_disappears_from_the_daemonset(field: str, value: Any, less: Any) -> None:
    wider, narrower = given(**{field: value}), merge(given(**{field: value}), {"spec": {field: less}})
    found = stored(**{field: value})
    patch = sked.daemonset_patch(sked.keep_daemonset(found), sked.build_daemonset(narrower))
    result, expected = merge(found, patch), copy(sked.build_daemonset(narrower))
    default_daemonset(result), default_daemonset(expected)
    assert patch and wider != narrower and result["spec"] == expected["spec"]


@pytest.mark.parametrize("spec", [None, "text", {}, {"sched": 5}, {"sched": RUSTY, "nodeSelector": ["a"]}, {"sched": RUSTY, "nodeSelector": {"a": 1}},
                                  {"sched": RUSTY, "hostPaths": "/sys"}, {"sched": RUSTY, "tolerations": "all"}, {"sched": RUSTY, "env": [{"name": False}]},
                                  {"sched": RUSTY, "resources": {"limits": {"cpu": "lots"}}}, {"sched": RUSTY, "updateStrategy": {"type": "Never"}}],
                         ids=lambda spec: json.dumps(spec)[:50])
def test_what_slips_through_the_schema_ends_in_the_status(server: ApiServer, ns: str, start: Callable, spec: Any, caplog: Any) -> None:
    server.validate = False
    start()
    server.create({**schedext("bad", RUSTY, ns), "spec": spec})
    eventually(lambda: reason(server, ns, "bad") == "Rejected")
    server.create(schedext("good", RUSTY, ns))
    eventually(lambda: server.get("daemonsets", ns, "good"))
    assert not [record for record in caplog.records if record.exc_info]
    assert len([record for record in caplog.records if f"{ns}/bad" in record.getMessage()]) == 1


# ---------------------------------------------------------------- the command line and the connection


@pytest.mark.parametrize("flag, name, value", [
    ("--leader-elect", "leader_elect", True), ("--leader-elect=false", "leader_elect", False), ("-leader-elect", "leader_elect", True),
    ("-leader-elect=F", "leader_elect", False), ("--zap-devel=true", "leader_elect", False), ("--enable-http2=false", "enable_http2", False),
    ("--metrics-secure=false", "metrics_secure", False), ("--leader-elect", "metrics_secure", True), ("--leader-elect", "metrics_bind_address", "0"),
    ("--leader-elect", "health_probe_bind_address", ":8081"), ("-health-probe-bind-address=:9", "health_probe_bind_address", ":9"),
])
def test_flags_mean_what_they_mean_to_the_go_operator(flag: str, name: str, value: Any) -> None:
    assert getattr(sked.parse([flag, "--namespace=a"]), name) == value


@pytest.mark.parametrize("flag, words", [
    ("--enable-http2=true", "HTTP/1.1 only"), ("--enable-http2", "HTTP/1.1 only"), ("--leader-elect=maybe", "'maybe' is neither true nor false"),
    ("--leader", "unrecognized arguments"),
])
def test_flags_that_cannot_be_obeyed_are_refused_in_a_sentence(capsys: pytest.CaptureFixture, flag: str, words: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        sked.main([flag])
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_the_version_is_that_of_the_image_in_install_yaml(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="0"):
        sked.main(["--version"])
    assert f"image: ghcr.io/schedkit/sked:{capsys.readouterr().out.strip()}\n" in (HERE / "install.yaml").read_text()


def certificate(folder: Path) -> ssl.SSLContext:
    """Makes a self-signed certificate, folder/tls.crt and tls.key, and what a server needs to show it."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=test", "-addext",
                    "subjectAltName=IP:127.0.0.1", "-keyout", folder / "tls.key", "-out", folder / "tls.crt"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with kubeconfigs whose contexts are named as their hosts; the environment points to none of them."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "POD_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="sked-") as folder:
        monkeypatch.setenv("HOME", folder)
        Path(folder, ".kube").mkdir()
        for name, current, *hosts in (("flag", "f1", "f1", "f2"), ("env", "e1", "e1"), ("silent", None, "s1"), ("other", "e1"), (".kube/config", "h1", "h1")):
            Path(folder, name).write_text(yaml.safe_dump({
                "current-context": current, "clusters": [{"name": host, "cluster": {"server": f"http://{host}"}} for host in hosts],
                "users": [{"name": host, "user": {}} for host in hosts],
                "contexts": [{"name": host, "context": {"cluster": host, "user": host}} for host in hosts]}))
        Path(folder, "text").write_text("just text")
        Path(folder, "broken").write_text("a: [")
        yield Path(folder)


@pytest.fixture
def in_pod(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a service account, as if in a pod."""
    from kubernetes.config import incluster_config
    certificate(home)
    (home / "token").write_text("first")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(home / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(home / "tls.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    return home


@pytest.mark.parametrize("flag, context, environment, host", [
    pytest.param("~/flag", None, "~/env", "http://f1", id="flag before environment"),
    pytest.param("~/flag", "f2", "", "http://f2", id="flag and context"),
    pytest.param(None, None, "~/env", "http://e1", id="environment before pod and home"),
    pytest.param(None, None, "~/none:~/silent:~/env:~/flag", "http://e1", id="first that names a context"),
    pytest.param(None, None, "~/other:~/flag:~/env", "http://e1", id="context of one file, cluster of another"),
    pytest.param(None, "e1", "~/flag:~/env", "http://e1", id="context of the second file"),
    pytest.param(None, None, "", "https://127.0.0.1:6443", id="pod before home"),
    pytest.param(None, None, None, "http://h1", id="home, not in a pod"),
])
def test_the_first_of_flag_environment_pod_and_home_decides(
        in_pod: Path, monkeypatch: pytest.MonkeyPatch, flag: str | None, context: str | None, environment: str | None, host: str) -> None:
    monkeypatch.setenv("KUBECONFIG", environment or "")
    if environment is None:
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert sked.load_configuration(flag, context).host == host


@pytest.mark.parametrize("flags, words", [
    pytest.param([], "no kubeconfig at ~/.kube/config: name one with --kubeconfig or $KUBECONFIG", id="nothing"),
    pytest.param(["--kubeconfig=~/none"], "/none: name one with --kubeconfig", id="no file"),
    pytest.param(["--kubeconfig=~/flag", "--context=x"], "x", id="no such context"),
    pytest.param(["--kubeconfig=~/silent"], "current-context", id="no current context"),
    pytest.param(["--kubeconfig=~/text"], "text", id="no kubeconfig"),
    pytest.param(["--kubeconfig=~/broken"], "broken", id="no YAML"),
    pytest.param(["--kubeconfig=~/env", "--leader-elect"], "--leader-election-namespace", id="no namespace for the lease"),
    pytest.param(["--kubeconfig=~/env", "--health-probe-bind-address=x"], "'x' is no address such as :8081", id="no address"),
    pytest.param(["--kubeconfig=~/env", "--health-probe-bind-address=192.0.2.1:1"], "cannot listen at 192.0.2.1:1", id="not our address"),
    pytest.param(["--kubeconfig=~/env", "--metrics-bind-address=127.0.0.1:0", "--metrics-cert-dir=/none"], "/none", id="no certificate"),
    pytest.param(["--kubeconfig=~/env", "--metrics-bind-address=127.0.0.1:0"], "--metrics-cert-dir", id="no openssl"),
])
def test_what_cannot_be_started_says_why_in_one_line(
        home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture, flags: list[str], words: str) -> None:
    (home / ".kube" / "config").unlink()
    monkeypatch.setenv("PATH", "")
    assert sked.main(["--health-probe-bind-address=0", *flags]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("sked: ") and err.count("\n") == 1 and words in err and not out and not caplog.records


# ---------------------------------------------------------------- running: what its tests share

TIMES = {"REQUEST_SECONDS": 0.3, "WATCH_SECONDS": 1, "PROBE_SECONDS": 1, "LEASE_SECONDS": 3, "RENEW_SECONDS": 0.4, "RENEW_DEADLINE_SECONDS": 2.0}
LEASE = "b4c95cb3.schedkit.io"


@pytest.fixture(scope="session")
def hasty() -> Iterator[ModuleType]:
    """A copy of sked that waits for less, also where a time is a default argument."""
    text = (HERE / "sked.py").read_text()
    for name, seconds in TIMES.items():
        text, count = re.subn(rf"(?m)^{name} = [\d.]+", f"{name} = {seconds}", text)
        assert count == 1, f"{name} is no constant of sked.py any more"
    with tempfile.TemporaryDirectory(prefix="sked-") as folder:
        Path(folder, "sked.py").write_text(text)
        spec = importlib.util.spec_from_file_location("hasty", Path(folder, "sked.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def operate(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, int]]]:
    """Runs main, of sked or of the hasty one, in a thread of this process, which must end when its signal handler is called;
    returns the ports of its health and of its metrics."""
    handlers, codes, threads = [], [], []
    server.bookmark_seconds = 0.3
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append(handler))

    def begin(*flags: str, program: ModuleType = sked) -> tuple[int, int]:
        for name, value in (("backoff", lambda failures, most: 0.05), ("GATHER_SECONDS", 0.2), ("SETTLE_SECONDS", 0.2)):
            monkeypatch.setattr(program, name, value)
        if "KUBERNETES_SERVICE_HOST" not in os.environ:
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig("sked")))
        ports = free_port(), free_port()
        argv = [*("--health-probe-bind-address=127.0.0.1:{} --metrics-bind-address=127.0.0.1:{} --metrics-secure=false".format(*ports).split()), *flags]
        threads.append(threading.Thread(target=lambda: codes.append(program.main(argv))))
        threads[-1].start()
        eventually(lambda: all(map(listens, ports)))
        return ports
    yield begin
    for handler in handlers:
        handler(signal.SIGTERM, None)
    for thread in threads:
        thread.join(5)
    assert codes == [0] * len(threads)


@pytest.fixture
def replica(server: ApiServer, hasty: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OperatorProcess]]:
    """Starts processes of the hasty sked that want the lease in a namespace."""
    monkeypatch.setattr(sys.modules[OperatorProcess.__module__], "HERE", Path(hasty.__file__).parent)
    with contextlib.ExitStack() as stack:
        def begin(namespace: str, user: str = "kubelets") -> OperatorProcess:
            if not server.get("namespaces", "", namespace):
                server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
            flags = "--leader-elect", f"--leader-election-namespace={namespace}", f"--health-probe-bind-address=127.0.0.1:{(port := free_port())}"
            process = stack.enter_context(OperatorProcess(server.kubeconfig(user), *flags))
            process.port = port
            return process
        yield begin


def free_port() -> int:
    """One that no outgoing connection takes in the meantime: those get higher ones."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def ask(port: int, path: str, method: str = "GET", token: str = "", tls: bool = False) -> tuple[int, str, Any]:
    """Status, body and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10) if not tls else http.client.HTTPSConnection(
        "127.0.0.1", port, timeout=10, context=ssl._create_unverified_context())
    with contextlib.closing(connection):
        connection.request(method, path, headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        return response.status, response.read().decode(), response.headers


def images(server: ApiServer) -> dict[str, str]:
    """The image of each DaemonSet that a SchedExt controls."""
    return {obj["metadata"]["name"]: obj["spec"]["template"]["spec"]["containers"][0]["image"] for obj in server.list("daemonsets")
            if dig(obj, ".metadata.ownerReferences[0].kind") == "SchedExt"}


# ---------------------------------------------------------------- faults of the API server


TROUBLE = {  # how it begins and ends, and what the lines in the log say
    "unreachable": (lambda server: server.stop_listening(), lambda server: server.start_listening(), ["Connection refused"]),
    "frozen": (lambda server: server.freeze(), lambda server: server.thaw(), ["timed out"]),
    "no CRD": (lambda server: server.delete("customresourcedefinitions", "", "schedexts.sked.schedkit.io"), lambda server: server.create(next(
        obj for obj in yaml.safe_load_all((HERE / "install.yaml").read_text()) if obj["kind"] == "CustomResourceDefinition")),
        ["install the CRD with 'kubectl apply -f install.yaml'"]),
    "forbidden": (lambda server: server.tokens.update(sked="nobody"), lambda server: server.tokens.update(sked="sked"),
                  [f'{what} is forbidden: User "nobody" cannot list' for what in ("daemonsets.apps", "pods", "schedexts.sked.schedkit.io")]),
    "wrong certificate": (lambda server: setattr(server.tls, "sni_callback", lambda connection, *_, wrong=certificate(server.folder / "wrong"):
                                                 setattr(connection, "context", wrong)),
                          lambda server: setattr(server.tls, "sni_callback", None), ["self-signed certificate"]),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_trouble_is_told_once_and_waited_out(
        server: ApiServer, operate: Callable, hasty: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    begin, end, lines = TROUBLE[trouble]
    if trouble == "wrong certificate":
        listen_with_tls(server, certificate(server.folder))
        monkeypatch.setenv("SSL_CERT_FILE", str(server.folder / "tls.crt"))
    begin(server)
    caplog.set_level(logging.INFO)
    _, port = operate(program=hasty if trouble == "frozen" else sked)
    eventually(lambda: (read_metric(port, "sked_watch_restarts_total") or 0) >= 9)
    warnings = lambda: sorted(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    told = warnings()
    assert len(told) == len(lines) and all(words in line and "\n" not in line for words, line in zip(lines, told))
    end(server)
    server.create(schedext("late"))
    eventually(lambda: images(server) == {"late": RUSTY} and "the API server answers again" in caplog.messages)
    assert warnings() == told and caplog.messages.count("the API server answers again") == 1


@pytest.mark.parametrize("action, more", [
    pytest.param("drop", {}, id="connection lost"),
    pytest.param("lose", {}, id="answer lost"),
    pytest.param("truncate", {}, id="truncated"),
    pytest.param("garbage", {}, id="not JSON"),
    pytest.param("hang", {}, id="no answer"),
    pytest.param("stall", {}, id="silent in mid-answer"),
    pytest.param("error", {"status": 500}, id="500"),
    pytest.param("error", {"status": 410}, id="410 as a status"),
])
def test_a_fault_is_survived_and_nothing_is_missed(
        server: ApiServer, operate: Callable, hasty: ModuleType, caplog: pytest.LogCaptureFixture, action: str, more: dict) -> None:
    for name in ("stays", "edited", "deleted"):
        server.create(schedext(name))
    operate(program=hasty)
    eventually(lambda: images(server) == {"stays": RUSTY, "edited": RUSTY, "deleted": RUSTY})
    server.stop_listening()
    server.create(schedext("new"))
    server.patch("schedexts", "default", "edited", {"spec": {"sched": LAVD}})
    server.delete("schedexts", "default", "deleted")
    server.compact()  # so that each watch is answered by an ERROR event of 410, and then each list fails too
    faults = [server.fault(*where, action, **more) for where in (
        ("GET", "watch=true", 3), ("GET", "limit=", 3), ("POST", "daemonsets", 1), ("PATCH", "daemonsets", 1))]
    server.start_listening()
    eventually(lambda: images(server) == {"stays": RUSTY, "edited": LAVD, "new": RUSTY})
    assert [fault.hits for fault in faults] == [3, 3, 1, 1]
    server.delete("schedexts", "default", "edited")
    server.create(schedext("later"))
    eventually(lambda: images(server) == {"stays": RUSTY, "new": RUSTY, "later": RUSTY})
    assert "bug" not in caplog.text


@pytest.mark.parametrize("method, path", [("GET", "/schedexts"), ("POST", "/daemonsets")])
def test_retry_after_is_obeyed(server: ApiServer, operate: Callable, method: str, path: str) -> None:
    server.fault(method, path, status=429, headers={"Retry-After": "1"})
    server.create(schedext("scx"))
    operate()
    eventually(lambda: images(server) == {"scx": RUSTY})
    refused, repeated = [request.time for request in server.requests if (request.user, request.method) == ("sked", method) and path in request.path][:2]
    assert 1.0 <= repeated - refused < 3.0


@pytest.mark.parametrize("refuse_future", [pytest.param(True, id="504 to a version to come"), pytest.param(False, id="silence to a version to come")])
def test_a_restore_from_a_backup_is_noticed(server: ApiServer, operate: Callable, hasty: ModuleType, refuse_future: bool) -> None:
    server.refuse_future = refuse_future
    server.create(schedext("early"))
    backup = server.snapshot()
    operate(program=hasty)
    server.create(schedext("lost"))
    eventually(lambda: images(server) == {"early": RUSTY, "lost": RUSTY})
    for n in range(100):
        server.patch("schedexts", "default", "lost", {"metadata": {"labels": {"n": str(n)}}})
    far = server.version  # where each watch has to have come, else it could not know that it is in the future
    eventually(lambda: len({request.resource for request in server.requests if int(request.query.get("resourceVersion", 0)) >= far}) == 3)
    server.restore(backup)
    server.create(schedext("new"))
    eventually(lambda: images(server) == {"early": RUSTY, "new": RUSTY})
    server.patch("schedexts", "default", "early", {"spec": {"sched": LAVD}})
    eventually(lambda: images(server) == {"early": LAVD, "new": RUSTY})


def listen_with_tls(server: ApiServer, context: ssl.SSLContext) -> None:
    server.stop_listening()
    server.tls = context
    server.start_listening()


def test_a_rotated_token_is_read_again(
        in_pod: Path, server: ApiServer, operate: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    listen_with_tls(server, certificate(in_pod))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    server.tokens["first"] = "sked"
    operate()
    server.create(schedext("before"))
    eventually(lambda: images(server) == {"before": RUSTY})
    server.tokens["second"] = server.tokens.pop("first")
    server.drop_connections()
    server.create(schedext("after"))
    eventually(lambda: "Unauthorized; trying again" in caplog.text)
    (in_pod / "token").write_text("second")
    eventually(lambda: images(server) == {"before": RUSTY, "after": RUSTY}, sked.TOKEN_SECONDS - 1)


def set_clock(mocker: Any, seconds: float) -> None:
    """Moves the clock on the wall, not the monotonic one."""
    real = time.time
    mocker.patch("time.time", lambda: real() + seconds)
    mocker.patch("datetime.datetime", type("Moved", (datetime,), {"now": classmethod(lambda cls, zone=None: datetime.fromtimestamp(time.time(), zone))}))


def test_a_clock_set_back_stalls_nothing(server: ApiServer, operate: Callable, mocker: Any) -> None:
    Kubelets(server, nodes=1).exclusive = False
    operate()
    server.create(schedext("before"))
    eventually(lambda: images(server) == {"before": RUSTY})
    set_clock(mocker, -3600)
    server.fault("POST", "/daemonsets")
    server.create(schedext("after"))
    eventually(lambda: images(server) == {"before": RUSTY, "after": RUSTY})
    eventually(lambda: [reason(server, "default", name) for name in ("before", "after")] == ["AllReady", "AllReady"])


def test_lists_come_in_pages_and_start_anew_where_a_page_is_gone(server: ApiServer, operate: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sked.PAGE_ITEMS <= 500
    monkeypatch.setattr(sked, "PAGE_ITEMS", 7)
    names = [f"scx-{n}" for n in range(30)]
    for name in names:
        server.create(schedext(name))
    gone = server.fault("GET", "schedexts.*continue=", status=410)
    operate()
    eventually(lambda: images(server) == dict.fromkeys(names, RUSTY))
    lists = [request for request in server.requests if request.user == "sked" and request.verb == "list"]
    assert gone.hits == 1 and {request.query.get("limit") for request in lists} == {"7"}
    assert [request.resource for request in lists].count("schedexts") == 2 + 5


def test_killed_again_and_again_it_ends_with_exactly_the_right_daemonsets(server: ApiServer) -> None:
    made = {f"scx-{n}": server.create(schedext(f"scx-{n}"))["metadata"]["uid"] for n in range(200)}
    foreign = [server.create(daemonset(name, "default") | {"metadata": {"name": name, "namespace": "default"}}) for name in ("other", "scx-150")]
    server.delay = 0.01
    for enough in (1, 70, 140):
        with OperatorProcess(server.kubeconfig("sked")) as operator:
            eventually(lambda: len(images(server)) >= enough, 30)
            operator.stop(signal.SIGKILL)
        assert len(images(server)) < 199
    server.delay = 0.0
    with OperatorProcess(server.kubeconfig("sked")) as operator:
        eventually(lambda: len(images(server)) == 199 and reason(server, "default", "scx-150") == "NameTaken", 30)
        assert operator.stop() == 0
    owners = {obj["metadata"]["name"]: [owner["uid"] for owner in obj["metadata"].get("ownerReferences", [])] for obj in server.list("daemonsets")}
    assert owners == {name: [uid] for name, uid in made.items()} | {"other": [], "scx-150": []}
    assert [server.get("daemonsets", "default", obj["metadata"]["name"]) for obj in foreign] == foreign
    writes = [(request.verb, request.status) for request in server.writes() if request.what == "daemonsets"]
    assert {verb for verb, _ in writes} == {"create"} and writes.count(("create", 201)) == 199


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("state, sent", [("watching", signal.SIGINT), ("writing", signal.SIGTERM), ("standing by", signal.SIGTERM)],
                         ids=["SIGINT, watching", "SIGTERM, writing", "SIGTERM, standing by"])
def test_a_signal_ends_it_within_two_seconds_also_while_it_is_blocked(server: ApiServer, state: str, sent: int) -> None:
    hangs, flags = server.fault("POST", "/daemonsets", None, "hang"), []
    if state == "writing":
        server.create(schedext("scx"))
    if state == "standing by":
        server.freeze()
        flags = ["--leader-elect", "--leader-election-namespace=sked-system"]
    blocked = {"watching": lambda: sum(request.verb == "watch" for request in server.requests) == 3, "writing": lambda: hangs.hits,
               "standing by": lambda: server.connections}[state]
    with OperatorProcess(server.kubeconfig("sked"), *flags) as operator:
        eventually(blocked, 30)
        start = time.monotonic()
        assert operator.stop(sent) == 0
        assert time.monotonic() - start < 2 and not any("Traceback" in line for line in operator.lines)


def test_a_signal_at_the_worst_moment_is_no_deadlock(server: ApiServer) -> None:
    interrupted = """if True:
        import os, signal, threading
        class Event(threading.Event):
            sent = []
            def wait(self, timeout=None):
                if timeout and threading.current_thread() is threading.main_thread() and not self.sent:
                    with self._cond:  # as wait does it, and a signal may come just then
                        self.sent.append(os.kill(os.getpid(), signal.SIGTERM))
                return super().wait(timeout)
        threading.Event = Event
        import sked
        raise SystemExit(sked.main())"""
    server.freeze()  # so that it waits for its caches
    argv = [sys.executable, "-c", interrupted, f"--kubeconfig={server.kubeconfig('sked')}", "--health-probe-bind-address=0"]
    with subprocess.Popen(argv, cwd=HERE) as process:
        try:
            eventually(lambda: process.poll() is not None or len(server.connections) == 3, 30)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            process.terminate()  # in case that there is no such moment
            assert process.wait(2) == 0
        finally:
            process.kill()


# ---------------------------------------------------------------- leader election


def lease(server: ApiServer, namespace: str = "sked-system", **spec: Any) -> dict:
    """What the Lease says, after it was made or changed so."""
    if spec and server.get("leases", namespace, LEASE):
        server.patch("leases", namespace, LEASE, {"spec": spec})
    elif spec:
        server.create({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": LEASE, "namespace": namespace}, "spec": spec})
    return server.get("leases", namespace, LEASE)["spec"]


def leading(replicas: list[OperatorProcess]) -> list[OperatorProcess]:
    return [one for one in replicas if one.process.poll() is None and any(line.endswith(" leading\n") for line in one.lines)]


def test_of_three_replicas_one_works_and_hands_over_on_sigterm(server: ApiServer, replica: Callable) -> None:
    replicas = [replica("sked-system", "sked") for _ in range(3)]
    first, = eventually(lambda: leading(replicas), 30)
    server.create(schedext("one"))
    eventually(lambda: "one" in images(server) and all(listens(one.port) and ask(one.port, "/readyz")[0] == 200 for one in replicas), 30)
    assert sorted(ask(one.port, "/readyz")[1] for one in replicas) == ["ok\n", "standing by\n", "standing by\n"]
    before = lease(server)
    after = eventually(lambda: (now := lease(server))["renewTime"] > before["renewTime"] and now)
    assert after == before | {"renewTime": after["renewTime"]}
    assert before["holderIdentity"].startswith(f"{socket.gethostname()}_") and (before["leaseDurationSeconds"], before["leaseTransitions"]) == (3, 0)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", before[field]) for field in ("acquireTime", "renewTime"))

    start = time.monotonic()
    assert first.stop() == 0
    second, = eventually(lambda: leading(replicas), start + 3 - time.monotonic())
    server.create(schedext("two"))
    eventually(lambda: "two" in images(server))
    after = lease(server)
    assert after["leaseTransitions"] == 1 and after["acquireTime"] > before["acquireTime"] and after["holderIdentity"] != before["holderIdentity"]
    next(one for one in replicas if one not in (first, second)).kill()
    assert second.stop() == 0 and lease(server)["holderIdentity"] == ""
    assert [request.status for request in server.writes() if request.what == "daemonsets"] == [201, 201]


def test_a_leader_killed_or_frozen_is_followed_when_its_lease_is_over_and_writes_nothing_more(server: ApiServer, replica: Callable) -> None:
    signals = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
    leaders = [replica(name) for name in signals]
    eventually(lambda: leading(leaders) == leaders, 30)
    others = [replica(name, "admin") for name in signals]  # as another user, so that the writes can be told apart
    server.create(schedext("before"))
    eventually(lambda: images(server) and all("waiting for the lease" in "".join(one.lines) for one in others), 30)
    for leader, sent in zip(leaders, signals.values()):
        leader.process.send_signal(sent)
    start = time.monotonic()
    for n in range(20):
        server.create(schedext(f"scx-{n}"))
    eventually(lambda: leading(others))
    assert time.monotonic() - start > 2
    eventually(lambda: leading(others) == others, start + 6 - time.monotonic())
    taken = time.time()
    eventually(lambda: len(images(server)) == 21)
    assert leaders[1].stop(signal.SIGCONT) == 1 and "another one may lead now" in leaders[1].lines[-1]
    assert server.writes(taken, "kubelets", leases=True) == []


def test_a_leader_that_cannot_renew_exits_before_another_may_lead(server: ApiServer, replica: Callable) -> None:
    actions = {"hangs": "hang", "refuses": "drop", "errs": "error"}
    leaders = [replica(name) for name in actions]
    eventually(lambda: leading(leaders) == leaders, 30)
    for name, action in actions.items():
        server.fault("PUT", f"/namespaces/{name}/leases", None, action)
    start = time.monotonic()
    assert [one.process.wait(6) for one in leaders] == [1, 1, 1]
    assert 1 < time.monotonic() - start < 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_leader_that_has_ceased_to_renew_writes_nothing_more(
        mocker: Any, monkeypatch: pytest.MonkeyPatch, server: ApiServer, hasty: ModuleType, operate: Callable) -> None:
    take, ended = hasty.Elector.take, mocker.patch("os._exit", side_effect=SystemExit)
    monkeypatch.setattr(hasty.Elector, "take", lambda elector: sys.exit() if elector.leads() else take(elector))
    monkeypatch.setattr(hasty, "RENEW_DEADLINE_SECONDS", 1.0)
    _, port = operate("--leader-elect", "--leader-election-namespace=sked-system", program=hasty)
    server.create(schedext("in-time"))
    eventually(lambda: images(server) and read_metric(port, "leader_election_master_status") == 0)
    server.create(schedext("late"))
    eventually(lambda: ended.called)
    assert ended.call_args == mocker.call(1) and images(server) == {"in-time": RUSTY}


def test_the_lease_of_another_operator_is_respected_while_it_changes_whatever_its_clock_says(server: ApiServer, replica: Callable) -> None:
    clocks = {"past": "2001-01-01T00:00:0{}.000000Z", "future": "2099-01-01T00:00:0{}.000000Z"}
    renew = lambda second: [lease(server, name, holderIdentity="go", leaseDurationSeconds=2, leaseTransitions=7, renewTime=clock.format(second))
                            for name, clock in clocks.items()]
    others = [replica(name) for name in clocks]
    renew(0)
    server.create(schedext("scx"))
    eventually(lambda: all("waiting for the lease" in "".join(one.lines) for one in others), 30)
    for second in range(1, 9):
        time.sleep(0.3)  # in all for longer than the 2 s of the lease
        renew(second)
    start = time.monotonic()
    assert [lease(server, name)["holderIdentity"] for name in clocks] == ["go", "go"] and not images(server)
    eventually(lambda: [lease(server, name)["leaseTransitions"] for name in clocks] == [8, 8], 5)
    assert time.monotonic() - start > 1.9
    eventually(lambda: images(server) == {"scx": RUSTY})


@pytest.mark.parametrize("seconds", [-3600, 3600], ids=["back", "forward"])
def test_a_clock_that_is_set_moves_no_lease(server: ApiServer, mocker: Any, seconds: float) -> None:
    leader, other = [sked.Elector(sked.Api(lambda: sked.load_configuration(str(server.kubeconfig("sked")), None)), "sked-system") for _ in range(2)]
    assert (leader.take(), other.take()) == (True, False)
    set_clock(mocker, seconds)
    assert leader.leads() and not other.take() and leader.take()


def test_the_lease_has_the_go_operators_name_and_times() -> None:
    assert (sked.LEASE_NAME, sked.LEASE_SECONDS, sked.RENEW_SECONDS, sked.RENEW_DEADLINE_SECONDS) == ("b4c95cb3.schedkit.io", 15, 2, 10)


@pytest.mark.parametrize("flag, account, expected", [("flag", "pod", "flag"), (None, "pod", "pod"), (None, None, "environment")])
def test_the_namespace_of_the_lease_is_that_of_flag_pod_or_environment(
        monkeypatch: pytest.MonkeyPatch, mocker: Any, flag: str | None, account: str | None, expected: str) -> None:
    monkeypatch.setenv("POD_NAMESPACE", "environment")
    mocker.patch("os.path.exists", lambda path: bool(account) and path == "/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    mocker.patch("builtins.open", mocker.mock_open(read_data=f"{account}\n"))
    assert sked.lease_namespace(flag) == expected


# ---------------------------------------------------------------- health


def test_health_speaks_http(operate: Callable) -> None:
    port, _ = operate()
    eventually(lambda: ask(port, "/readyz")[:2] == (200, "ok\n"))
    assert ask(port, "/healthz?verbose")[:2] == (200, "ok\n")
    with socket.create_connection(("127.0.0.1", port)) as client, client.makefile("rb") as answer:
        client.sendall(b"HEAD /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert re.fullmatch(rb"HTTP/1.1 200 OK\r\n.*\r\nContent-Length: 3\r\n\r\n", answer.read(), re.DOTALL)
    assert ask(port, "/metrics")[0] == ask(port, "/")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "JUNK"):
        status, _, headers = ask(port, "/healthz", method)
        assert (method, status, headers["Allow"]) == (method, 405, "GET, HEAD")


def test_it_is_ready_when_all_caches_are_filled(server: ApiServer, operate: Callable) -> None:
    missing = server.fault("GET", "/pods", None)
    port, _ = operate()
    eventually(lambda: missing.hits >= 3)
    assert ask(port, "/readyz")[0] == 503 and ask(port, "/healthz")[0] == 200
    missing.clear()
    eventually(lambda: ask(port, "/readyz")[0] == 200)


def test_idle_slow_and_junk_clients_do_not_stop_health(operate: Callable) -> None:
    port, _ = operate()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]
        for client, junk in zip(clients, (b"GET /healthz HTTP/1.1\r\nX: ", b"\x16\x03\x01\x02\x00\x01", b"\r\n" * 100, b"GET " + b"x" * 70_000, b"\0\xff\n")):
            client.sendall(junk)
        start = time.monotonic()
        assert [ask(port, "/healthz")[0] for _ in range(5)] == [200] * 5
        assert time.monotonic() - start < 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_hangs_and_a_watch_that_died_turn_health_to_503(
        server: ApiServer, operate: Callable, hasty: ModuleType, mocker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    over, handle = threading.Event(), hasty.Reflector.handle
    monkeypatch.setattr(hasty, "REQUEST_SECONDS", 0.2)
    port, _ = operate(program=hasty)
    eventually(lambda: ask(port, "/readyz")[0] == 200)
    worker = mocker.patch.object(hasty, "build_daemonset", side_effect=lambda *_: over.wait())
    server.create(schedext("one"))
    eventually(lambda: worker.called)
    monkeypatch.setattr(hasty.Reflector, "handle", lambda self, kind, obj: sys.exit() if obj["kind"] == "SchedExt" else handle(self, kind, obj))
    server.create(schedext("two"))
    text = eventually(lambda: (answer := ask(port, "/healthz"))[0] == 503 and "," in answer[1] and answer[1])
    over.set()
    assert re.fullmatch(r"no sign of life from schedexts, worker-\d\n", text)


def test_an_outage_of_the_api_server_leaves_health_as_it_is(server: ApiServer, operate: Callable, hasty: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    port, _ = operate(program=hasty)
    monkeypatch.setattr(hasty, "backoff", lambda failures, most: 0.5)
    eventually(lambda: ask(port, "/readyz")[0] == 200)
    server.stop_listening()
    end = time.monotonic() + 1.2  # two attempts
    while time.monotonic() < end:
        assert ask(port, "/healthz")[:2] == (200, "ok\n")
        time.sleep(0.05)


# ---------------------------------------------------------------- metrics


def parse_metrics(text: str) -> dict[tuple[str, frozenset], float]:
    """The samples by name and labels, as Prometheus reads them; fails where it would, and where a histogram makes no sense."""
    types, samples, family = {}, {}, ""
    assert text.endswith("\n") and "\n\n" not in text
    for line in text.splitlines():
        if comment := re.fullmatch(r"# TYPE ([a-z_]+) (counter|gauge|histogram)", line):
            family = comment[1]
            assert family not in types
            types[family] = comment[2]
            continue
        name, labels, value = re.fullmatch(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)', line).groups()
        assert name.removeprefix(family) in (("_bucket", "_sum", "_count") if types[family] == "histogram" else ("",))
        found = re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', labels or "")
        key = name, frozenset((label, re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), text)) for label, text in found)
        assert key not in samples and len(dict(found)) == len(found)
        samples[key] = float(value)
    for (name, labels), count in samples.items():
        if types.get(family := name.removesuffix("_count")) == "histogram":
            buckets = {float(dict(of)["le"]): value for (name, of), value in samples.items() if name == f"{family}_bucket" and of > labels}
            assert list(buckets) == sorted(buckets) and list(buckets.values()) == sorted(buckets.values())
            assert buckets[float("inf")] == count and (f"{family}_sum", labels) in samples
    return samples


def read_metric(port: int, name: str, /, **labels: str) -> float | None:
    """What a metric says, the sum where labels are left open; None where there is none."""
    found = [value for (of, having), value in parse_metrics(ask(port, "/metrics")[1]).items() if of == name and having >= set(labels.items())]
    return sum(found) if found else None


def test_metrics_tell_what_happened(server: ApiServer, operate: Callable) -> None:
    _, port = operate()
    metric = functools.partial(read_metric, port)
    nodes = functools.partial(metric, "sked_schedext_nodes", namespace="default", name="scx")
    Kubelets(server, nodes=2)
    server.fault("POST", "/daemonsets", status=500)
    server.create(schedext("scx"))
    eventually(lambda: nodes(state="ready") == 2)
    server.fault("GET", "/pods", status=503)
    server.drop_connections()
    eventually(lambda: metric("sked_api_errors_total", code="503") == 1)
    assert [nodes(state=state) for state in ("desired", "updated", "failing")] == [2, 2, 0]
    assert metric("controller_runtime_reconcile_total", controller="schedext", result="error") == 1
    assert metric("controller_runtime_reconcile_total", controller="schedext", result="success") > 0
    reconciles = metric("controller_runtime_reconcile_total")
    assert metric("controller_runtime_reconcile_time_seconds_count", controller="schedext") >= reconciles
    assert 0 < metric("controller_runtime_reconcile_time_seconds_sum") < 30
    assert metric("workqueue_queue_duration_seconds_count", name="schedext") >= reconciles
    assert metric("workqueue_depth", name="schedext") == 0
    assert metric("workqueue_retries_total", name="schedext") == 1
    assert metric("sked_api_writes_total", kind="DaemonSet", verb="create") == 1
    assert metric("sked_api_writes_total", kind="SchedExt", verb="patch") >= 1
    assert metric("sked_api_errors_total", code="500") == 1
    assert metric("sked_watch_restarts_total", resource="pods") >= 1
    assert metric("leader_election_master_status", name=LEASE) == 1
    assert metric("sked_build_info", version=sked.__version__) == 1
    assert abs(metric("process_start_time_seconds") - time.time()) < 60
    assert metric("process_cpu_seconds_total") == pytest.approx(time.process_time(), abs=2)
    assert metric("process_resident_memory_bytes") > 20e6
    assert metric("process_open_fds") == pytest.approx(len(os.listdir("/proc/self/fd")), abs=20)
    server.delete("schedexts", "default", "scx")
    eventually(lambda: nodes() is None)


def test_label_values_are_escaped() -> None:
    metrics = sked.Metrics()
    metrics.add("sked_api_errors_total", code='a "b" \\n\nc')
    assert 'sked_api_errors_total{code="a \\"b\\" \\\\n\\nc"} 1.0' in metrics.text({}).splitlines()


def test_metrics_are_for_those_whom_the_api_server_allows(
        server: ApiServer, operate: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server.tokens |= {"token-of-reader": "reader", "token-of-nobody": "nobody"}
    server.metrics_readers.add("reader")
    _, port = operate("--metrics-secure")
    monkeypatch.setattr(sked.Reviewer, "MOST", 10)
    reviews = lambda: [sum(request.resource == what for request in server.requests) for what in REVIEWS]
    get = lambda token, method="GET": ask(port, "/metrics", method, token, tls=True)[0]
    assert get("") == 401 and reviews() == [0, 0]
    assert [get("token-of-reader") for _ in range(5)] == [200] * 5 and reviews() == [1, 1]
    assert [get("token-of-nobody") for _ in range(5)] == [403] * 5 and reviews() == [2, 2]
    assert get("token-of-reader", "POST") == 405 and "sked_build_info" in ask(port, "/metrics", token="token-of-reader", tls=True)[1]
    server.fault("POST", "/tokenreviews")
    assert get("token-unreviewed") == 503
    assert [get(f"token-{n}") for n in range(12)] == [401] * 7 + [429] * 5 and reviews() == [10, 2]
    assert get("token-of-reader") == 200 and "token-" not in caplog.text


def test_strangers_do_not_crowd_out_who_was_let_in_before(mocker: Any) -> None:
    reviewer = sked.Reviewer(mocker.Mock())
    review = mocker.patch.object(reviewer, "review", side_effect=lambda token: 200 if token == "scraper" else 401)
    clock = mocker.patch.object(sked.time, "monotonic", return_value=0.0)
    assert reviewer.status("Bearer scraper") == 200
    clock.return_value = 11.0
    assert [reviewer.status(f"Bearer {n}") for n in range(101)] == [401] * 99 + [429] * 2
    assert reviewer.status("Bearer scraper") == 200 and review.call_count == 101


def test_a_given_certificate_is_shown_also_after_it_was_renewed(server: ApiServer, operate: Callable) -> None:
    certificate(server.folder)
    _, port = operate("--metrics-secure", f"--metrics-cert-dir={server.folder}")
    for _ in range(2):
        assert ssl.get_server_certificate(("127.0.0.1", port)) == (server.folder / "tls.crt").read_text()
        certificate(server.folder)


# ---------------------------------------------------------------- install.yaml, README.md and the image

README, DOCKERFILE = (HERE / "README.md").read_text(), (HERE / "Dockerfile").read_text()
PROSE = re.sub(r"(?ms)^```.*?^```$", "", README)
MANIFESTS = [obj for obj in yaml.safe_load_all((HERE / "install.yaml").read_text()) if obj]
SCHEMA = next(obj for obj in MANIFESTS if obj["kind"] == "CustomResourceDefinition")["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC = SCHEMA["properties"]["spec"]["properties"]
NODES = SCHEMA["properties"]["status"]["properties"]["nodes"]["properties"]


def blocks(language: str) -> list[str]:
    """The fenced blocks of the README in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def rows(heading: str) -> list[list[str]]:
    """The rows of the README's table whose first column has that heading."""
    table = re.search(rf"^\| {re.escape(heading)} \|.*\n\| ---.*\n((?:\|.*\n)+)", README, re.M)[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def words(text: str) -> set[str]:
    """What stands between backquotes."""
    return set(re.findall(r"`([^`\n]+)`", text))


def installed(kind: str, name: str = "") -> dict:
    return next(obj for obj in MANIFESTS if obj["kind"] == kind and name in ("", obj["metadata"]["name"]))


@functools.cache
def judge() -> ApiServer:
    """An API server that is only asked what it would do."""
    return ApiServer()


def try_to_create(obj: dict, user: str = "admin") -> str:
    """The refusal of the API server, or nothing where it would create the object."""
    kind = next(kind for kind in judge().resources.values() if kind.kind == obj["kind"])
    try:
        judge().call("POST", f"{kind.path(obj['metadata'].get('namespace', 'default'))}?dryRun=All&fieldValidation=Strict", obj, user=user)
    except Refusal as refusal:
        return str(refusal)
    return ""


SCHEDEXT_EXAMPLES = [obj for block in blocks("yaml") for obj in yaml.safe_load_all(block) if obj.get("kind") == "SchedExt"]
FIELD_EXAMPLES = [(words(field).pop(), yaml.safe_load(words(example).pop())) for field, _, example in rows("field of `spec`")]


def test_the_first_screen_of_the_readme_has_a_schedext_of_five_lines_and_what_kubectl_shows_of_it() -> None:
    screen = "\n".join(README.splitlines()[:25])
    assert blocks("yaml")[0] in screen and len(blocks("yaml")[0].splitlines()) == 5
    shown = {"metadata": {"name": "scx-rusty", "creationTimestamp": now()}, "spec": SCHEDEXT_EXAMPLES[0]["spec"], "status": {
        "nodes": {"desired": 3, "ready": 3}, "conditions": [{"type": "Ready", "reason": "AllReady"}]}}
    for line in print_table(make_table(judge().resources["schedexts"], [shown], {})).splitlines():
        assert line.rpartition(" ")[0] in screen  # its age aside


def test_version_image_and_readme_agree() -> None:
    manager = installed("Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert manager["image"] == f"ghcr.io/schedkit/sked:{sked.__version__}"
    assert f'org.opencontainers.image.version="{sked.__version__}"' in DOCKERFILE
    assert set(re.findall(r"/sked:([\w.-]+)", README + DOCKERFILE)) == {sked.__version__}


@pytest.mark.parametrize("obj", SCHEDEXT_EXAMPLES + [schedext("scx", **{field: value}) for field, value in FIELD_EXAMPLES],
                         ids=lambda obj: f"{obj['metadata']['name']}: {', '.join(obj['spec'])}")
def test_every_schedext_in_the_readme_is_accepted_and_so_is_its_daemonset(obj: dict) -> None:
    assert try_to_create(obj) == ""
    built = sked.build_daemonset({**obj, "metadata": {**obj["metadata"], "namespace": "default", "uid": "u-1"}}, SCHEDEXT_EXAMPLES)
    assert try_to_create(built, "sked") == ""


def test_the_fields_in_the_readme_are_those_of_the_crd_and_those_that_build_daemonset_reads() -> None:
    read = set()

    class Spec(dict):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

        def __getitem__(self, key: str) -> Any:
            read.add(key)
            return super().__getitem__(key)
    sked.build_daemonset({"metadata": {"name": "x"}, "spec": Spec(sched="x")})
    assert read == set(SPEC) == {field for field, _ in FIELD_EXAMPLES}
    assert len(FIELD_EXAMPLES) == len(SPEC) == 14


def constants(function: Callable) -> set[str]:
    """The words in CamelCase among the strings that a function is made of."""
    strings = {node.value for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))) if isinstance(node, ast.Constant)}
    return {text for text in strings if isinstance(text, str) and re.fullmatch(r"([A-Z][a-z]+){2,}|[A-Z][a-z]{5,}", text)}


def test_the_reasons_in_the_readme_are_those_that_sked_gives() -> None:
    documented = {words(reason).pop() for reason, *_ in rows("reason")}
    assert documented == {"AllReady", "RollingOut", "NodesFailing", "NoNodes", "NameTaken", "Rejected"}
    assert constants(sked.ready_reason) | constants(sked.check_control) | constants(sked.Operator.apply) - {"Normal", "Created"} == documented | {"SchedExt", "OnDelete"}
    described = SCHEMA["properties"]["status"]["properties"]["conditions"]["items"]["properties"]["reason"]["description"]
    assert set(re.findall(r"[A-Z]\w+", described.partition("For Ready: ")[2])) == documented


def test_the_failures_in_the_readme_are_those_that_sked_names() -> None:
    documented = set().union(*(words(failure) for failure, *_ in rows("failure on a node")))
    given = constants(sked.pod_problem) | constants(sked.build_failure)
    assert {"CrashLoopBackOff", "AlreadyAttached", "Unschedulable"} <= given
    assert given - {"ContainerCreating", "PodInitializing", "PodScheduled", "Failed"} == documented - {"ImagePullBackOff", "ErrImagePull", "InvalidImageName"}


def test_what_happens_when_and_what_sked_is_not_are_told() -> None:
    assert [len(rows(heading)) for heading in ("when", "sked is not")] == [10, 4]


def test_every_flag_is_explained_and_the_readme_names_no_other(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        sked.main(["--help"])
    help = capsys.readouterr().out
    known = set(re.findall(r"--[a-z][a-z0-9-]+", help.partition("options:")[0]))
    explained = set(re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)(?: \S+)*\n? {2,}[a-z]", help, re.M))
    commands = re.findall(r"sked\.py (.*)", README) + re.findall(r'"value": "(--.*?)"', README) + [code for code in words(PROSE) if code.startswith("--")]
    named = set(re.findall(r"--[a-z][a-z0-9-]+", " ".join(commands)))
    assert len(known) >= 13 and known | {"--help"} == explained | named
    assert {"--kubeconfig", "--render", "--leader-elect", "--metrics-cert-dir", "--namespace"} <= named


CONSOLE = [(command, output) for block in blocks("console") for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)]


@pytest.mark.parametrize("command, output", [
    pytest.param(command, output, id=command) for command, output in CONSOLE if re.search(r"sked\.py --(render|version)", command)])
def test_what_the_readme_shows_of_sked_without_a_cluster_is_what_it_prints(tmp_path: Path, command: str, output: str) -> None:
    (tmp_path / "scx-rusty.yaml").write_text(blocks("yaml")[0])
    program, script, *args = command.split()
    assert (program, script) == (".venv/bin/python", "sked.py")
    assert subprocess.run([sys.executable, HERE / script, *args], cwd=tmp_path, capture_output=True, text=True).stdout == output


def test_the_readme_shows_render_and_version_and_the_two_commands_of_a_fresh_machine() -> None:
    assert {command.split()[2] for command, _ in CONSOLE if "sked.py" in command} == {"--render", "--version", "--log-level=debug"}
    prepare = "python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt && .venv/bin/python "
    assert [block for block in blocks("sh") if "venv .venv" in block] == [prepare + "test_sked.py\n", prepare + "-m pytest -q\n"]


def test_ci_runs_the_test_command_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "python3").chmod(0o755)
    ran = subprocess.run([HERE / ".ci" / "run"], env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True)
    assert ran.returncode == 7
    assert ran.stdout == "python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt && .venv/bin/python -m pytest -q\n"


def test_the_function_is_embedded_as_the_readme_shows(capsys: pytest.CaptureFixture) -> None:
    exec(blocks("python")[0], {})
    everywhere, latency = (yaml.safe_load(text) for text in capsys.readouterr().out.strip().split("\n\n"))
    excluded = dig(everywhere, ".spec.template.spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]")
    assert excluded == {"matchExpressions": [{"key": "pool", "operator": "NotIn", "values": ["latency"]}]}
    assert latency["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "latency"} and "affinity" not in latency["spec"]["template"]["spec"]


def test_the_loop_is_embedded_as_the_readme_shows() -> None:
    with ApiServer() as server:
        server.create(schedext("scx"))
        environment = os.environ | {"KUBECONFIG": str(server.kubeconfig("sked")), "PYTHONPATH": str(HERE)}
        process = subprocess.Popen([sys.executable, "-c", blocks("python")[1]], env=environment, stderr=subprocess.PIPE, text=True)
        eventually(lambda: server.get("daemonsets", "default", "scx") or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        log = process.communicate(timeout=5)[1]
    assert process.returncode == 0 and "default/scx: Created: created DaemonSet scx" in log


def test_the_metrics_in_the_readme_exist() -> None:
    named = set(re.findall(r"\b(?:sked|workqueue|controller_runtime|process|leader_election)_[a-z_]+\b", README))
    assert {"sked_schedext_nodes", "leader_election_master_status"} <= named <= set(sked.METRICS)
    assert set(re.findall(r'state="(\w+)"', README)) == {"failing", "desired"} <= set(NODES)


def test_the_readme_names_only_objects_that_are_installed() -> None:
    named = set(re.findall(r"(?<![\w./-])sked-[a-z-]+[a-z]", README.replace("sked-controller\n", "")))
    assert {"sked-system", "sked-controller-manager", "sked-manager-role", "sked-schedext-editor-role"} <= named
    assert named <= {obj["metadata"]["name"] for obj in MANIFESTS}


def test_every_link_in_the_readme_leads_somewhere() -> None:
    headings = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)", README, re.M)}
    inside = {link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("https://")}
    assert {link for link in inside if not link.startswith("#")} == {"sked.py", "install.yaml"}
    assert {link[1:] for link in inside if link.startswith("#")} <= headings


# ---------------------------------------------------------------- install.yaml: the CRD

IMAGE, SHA = "ghcr.io/schedkit/scheds/scx_rusty:latest", "sha256:" + "0123456789abcdef" * 4
GOOD = {
    "sched": ["scx_rusty", "schedkit/scx_rusty:1.0", "localhost/scx", "localhost:5000/a/b:v1", "registry:5000/scx", "Registry.Example.com:5000/team/scx:1.2.3",
              "10.0.0.1:5000/scx", "[::1]/scx", "[2001:db8::A]:5000/a/scx:tag", f"scx@{SHA}", f"[::1]:5000/scx:1@{SHA}", "a.b_c__d-e---f/x1",
              "scx:" + "t" * 128, "scx:_a.b-C", "a" * 512],
    "nodeSelector": [{}, {"pool": "latency", "kubernetes.io/arch": "arm64"}, {"node-role.kubernetes.io/worker": ""}, {"k" * 63: "v" * 63, "1": "A.b_c-9"}],
    "tolerations": [[], [{"operator": "Exists"}], [{"key": "dedicated", "value": "latency", "effect": "NoExecute", "tolerationSeconds": 300}],
                    [{"key": "a", "operator": "Equal", "value": ""}] * 2],
    "priorityClassName": ["system-node-critical"],
    "imagePullSecrets": [[{"name": "a"}, {"name": "b.c"}]],
    "hostPID": [True, False],
    "imagePullPolicy": ["Always", "IfNotPresent", "Never"],
    "args": [[], ["--slice-us", "5000", "--slice-us", "", "a b"]],
    "env": [[{"name": "A", "value": ""}, {"name": "a.b-c_D", "value": "$(A)"}, {"name": "B"}],
            [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
             {"name": "C", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k.x_Y-1", "optional": True}}},
             {"name": "D", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}}]],
    "resources": [{}, {"requests": {"cpu": 1, "memory": "1.5Gi"}, "limits": {"cpu": ".5", "memory": "1e9", "example.com/dongle": "1"}}, {"requests": {"cpu": 0}}],
    "terminationMessagePolicy": ["File", "FallbackToLogsOnError"],
    "updateStrategy": [{}, {"type": "OnDelete"}, {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 5}}, {"rollingUpdate": {"maxUnavailable": "100%"}}],
    "minReadySeconds": [0, 10],
    "hostPaths": [[], ["/sys/kernel/debug", "/a b/..c/d../...", "/x/.y"]],
}
REFERENCE, KEY = "must be an image reference, [registry[:port]/]path[:tag][@sha256:digest]", "a toleration needs a key, or else operator: Exists"
LABELS, SOURCE = "must be labels of nodes, such as pool: latency", "valueFrom needs exactly one of: configMapKeyRef, secretKeyRef, fieldRef, resourceFieldRef"
SHARE, PATHS = "must be a number of nodes from 1 up, or a percentage from 1% to 100%", "must be an absolute path such as /sys/kernel/debug"
BAD = [  # field, value, words of the refusal
    *(("sched", text, REFERENCE) for text in (
        "", " scx", "scx\n", "https://ghcr.io/schedkit/scx", "ghcr.io/Schedkit/scx", "Scx", "/scx", "scx/", "a//b", "scx:", "scx:a:b", "scx:" + "t" * 129,
        "scx:-tag", "scx@", f"scx@{SHA[:-1]}", f"scx@{SHA}0", f"scx@{SHA.upper()}", f"scx@sha512:{'0' * 128}", f"scx@{SHA}:tag", "scx-", "a..b", "a___b",
        "ghcr.io:/scx", "ghcr.io:port/scx", "ghcr.io:123456/scx", "::1/scx", "[::1/scx", "[::g]/scx", "user@host/scx", "$(IMAGE)", "\u00fc/scx")),
    ("sched", "a" * 513, "spec.sched: Too long: may not be more than 512 bytes"),
    ("sched", 5, "spec.sched in body must be of type string"),
    ("sched", None, "spec.sched: Required value"),
    *(("nodeSelector", {"pool": value}, LABELS) for value in ("low latency", "a-", "a/b", "a\n")),
    *(("nodeSelector", {key: "a"}, LABELS) for key in ("", "a b", "/a", "A.io/b", "a/b/c", "k" * 64, "d." * 200 + "io/k")),
    ("nodeSelector", {"pool": "a" * 64}, "spec.nodeSelector.pool: Too long: may not be more than 63 bytes"),
    ("nodeSelector", {"pool": True}, "spec.nodeSelector.pool in body must be of type string"),
    ("nodeSelector", {f"k{i}": "v" for i in range(33)}, "spec.nodeSelector: Too many: 33: must have at most 32 items"),
    *(("tolerations", [toleration], KEY) for toleration in ({}, {"operator": "Equal", "value": "x"}, {"effect": "NoSchedule"})),
    ("tolerations", [{"key": "", "operator": "Exists"}], "spec.tolerations[0].key in body should be at least 1 chars long"),
    ("tolerations", [{"key": "a", "value": "b c"}], "spec.tolerations[0].value in body should match"),
    ("tolerations", [{"key": "a", "operator": "Exists", "value": "b"}], "operator: Exists takes no value"),
    ("tolerations", [{"key": "a", "tolerationSeconds": 3}], "tolerationSeconds only goes with effect: NoExecute"),
    ("tolerations", [{"key": "a", "operator": "Lt"}], 'spec.tolerations[0].operator: Unsupported value: "Lt": supported values: "Exists", "Equal"'),
    ("tolerations", [{"key": "a", "effect": "Never"}], 'spec.tolerations[0].effect: Unsupported value: "Never"'),
    ("tolerations", [{"key": "a"}] * 65, "spec.tolerations: Too many: 65: must have at most 64 items"),
    ("priorityClassName", "High", "spec.priorityClassName in body should match"),
    ("imagePullSecrets", ["a"], "spec.imagePullSecrets[0] in body must be of type object"),
    ("imagePullSecrets", [{}], "spec.imagePullSecrets[0].name: Required value"),
    ("imagePullSecrets", [{"name": "a"}, {"name": "a"}], 'spec.imagePullSecrets[1]: Duplicate value: {"name":"a"}'),
    ("hostPID", "true", "spec.hostPID in body must be of type boolean"),
    ("imagePullPolicy", "always", 'spec.imagePullPolicy: Unsupported value: "always": supported values: "Always", "IfNotPresent", "Never"'),
    ("args", ["--slice-us", 5000], "spec.args[1] in body must be of type string"),
    ("args", "--slice-us 5000", "spec.args in body must be of type array"),
    ("env", [{"value": "x"}], "spec.env[0].name: Required value"),
    ("env", [{"name": "A=B"}], "spec.env[0].name in body should match"),
    ("env", [{"name": "A"}, {"name": "A"}], 'spec.env[1]: Duplicate value: {"name":"A"}'),
    ("env", [{"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}], "a variable has either a value or a valueFrom, not both"),
    ("env", [{"name": "A", "valueFrom": {}}], SOURCE),
    ("env", [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}, "secretKeyRef": {"name": "m", "key": "k"}}}], SOURCE),
    ("env", [{"name": "A", "valueFrom": {"secretKeyRef": {"key": "m"}}}], "spec.env[0].valueFrom.secretKeyRef.name: Required value"),
    ("env", [{"name": "A", "valueFrom": {"fileKeyRef": {"path": "x"}}}], 'unknown field "spec.env[0].valueFrom.fileKeyRef"'),
    *(("resources", {"limits": {"memory": amount}}, "spec.resources.limits.memory in body should match") for amount in ("64MB", "64 Mi", "-1", "")),
    ("resources", {"requests": {"cpu": -1}}, "spec.resources.requests.cpu in body should be greater than or equal to 0"),
    ("resources", {"requests": {"cpu": 0.5}}, "spec.resources.requests.cpu in body must be of type"),
    ("resources", {"claims": []}, 'unknown field "spec.resources.claims"'),
    ("terminationMessagePolicy", "Logs", 'spec.terminationMessagePolicy: Unsupported value: "Logs": supported values: "File", "FallbackToLogsOnError"'),
    *(("updateStrategy", {"rollingUpdate": {"maxUnavailable": share}}, SHARE) for share in (0, -1, "0%", "101%", "5", "1.5%", "ten")),
    ("updateStrategy", {"type": "OnDelete", "rollingUpdate": {"maxUnavailable": 1}}, "rollingUpdate only goes with type: RollingUpdate"),
    ("updateStrategy", {"type": "Recreate"}, 'spec.updateStrategy.type: Unsupported value: "Recreate": supported values: "RollingUpdate", "OnDelete"'),
    ("updateStrategy", {"rollingUpdate": {"maxSurge": 1}}, 'unknown field "spec.updateStrategy.rollingUpdate.maxSurge"'),
    ("minReadySeconds", -1, "spec.minReadySeconds in body should be greater than or equal to 0"),
    ("minReadySeconds", "10", "spec.minReadySeconds in body must be of type integer"),
    *(("hostPaths", [path], PATHS) for path in ("", "/", "sys", "/sys/", "/sys//kernel", "/sys/..", "/../etc", "/sys/./kernel", "/sys:/kernel")),
    ("hostPaths", ["/sys", "/proc", "/sys"], 'spec.hostPaths[2]: Duplicate value: "/sys"'),
    ("hostPaths", [f"/{i}" for i in range(33)], "spec.hostPaths: Too many: 33: must have at most 32 items"),
    ("replicas", 3, 'unknown field "spec.replicas"'),
]


@pytest.mark.parametrize("field, value", [(field, value) for field, values in GOOD.items() for value in values])
def test_the_crd_accepts_what_works_and_so_does_the_daemonset(field: str, value: Any) -> None:
    obj = schedext("scx", **{"sched": IMAGE, field: value})
    assert try_to_create(obj) == ""
    assert try_to_create(sked.build_daemonset({**obj, "metadata": {**obj["metadata"], "uid": "u-1"}}), "sked") == ""


@pytest.mark.parametrize("field, value, words", BAD)
def test_the_crd_refuses_nonsense_and_says_why(field: str, value: Any, words: str) -> None:
    assert words in try_to_create(schedext("scx", **{"sched": IMAGE, field: value}))


@pytest.mark.parametrize("name, refused", [("n" * 63, False), ("scx.rusty", False), ("n" * 64, True), ("n" * 253, True)])
def test_the_name_of_a_schedext_fits_into_a_label(name: str, refused: bool) -> None:
    assert ("may have at most 63 characters, because it becomes the value of a label" in try_to_create(schedext(name))) is refused
    assert bool(try_to_create(schedext(name))) is refused


def test_every_field_and_every_rule_of_the_crd_has_examples() -> None:
    def rules(schema: Any) -> Iterator[str]:
        for child in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
            yield from rules(child)
        yield from (rule["message"] for rule in schema.get("x-kubernetes-validations", ())) if isinstance(schema, dict) else ()
    assert set(GOOD) == set(SPEC) == {field for field, *_ in BAD} - {"replicas"}
    assert {message for message in rules(SPEC) if not any(words in message for *_, words in BAD)} == set()


def test_every_field_of_the_crd_is_described() -> None:
    def silent(schema: dict, path: str) -> Iterator[str]:
        yield from [] if schema.get("description") else [path]
        for name, child in [*schema.get("properties", {}).items(), *((f"{part}[]", schema[part]) for part in ("items", "additionalProperties") if part in schema)]:
            yield from silent(child, f"{path}.{name}")
    assert list(silent(SCHEMA, "")) == [".metadata"]


def test_kubectl_gets_image_desired_ready_reason_age_and_in_wide_the_message() -> None:
    obj = {"metadata": {"name": "scx", "creationTimestamp": now(73 * 3600)}, "spec": {"sched": IMAGE}, "status": {"nodes": {"desired": 3, "ready": 2}, "conditions": [
        {"type": "Other", "reason": "No"}, {"type": "Ready", "reason": "RollingOut", "message": "wait"}]}}
    table = make_table(judge().resources["schedexts"], [obj], {})
    assert [(column["name"], column["priority"]) for column in table["columnDefinitions"]] == [
        ("Name", 0), ("Image", 0), ("Desired", 0), ("Ready", 0), ("Reason", 0), ("Age", 0), ("Message", 1)]
    assert table["rows"][0]["cells"] == ["scx", IMAGE, 3, 2, "RollingOut", "3d", "wait"]
    names = installed("CustomResourceDefinition")["spec"]["names"]
    assert (names["shortNames"], names["categories"]) == (["scx"], ["all"])


# ---------------------------------------------------------------- install.yaml: the operator

OPERATOR_ROLES = [("ClusterRole", "sked-manager-role"), ("Role", "sked-leader-election-role"), ("ClusterRole", "sked-metrics-auth-role")]
RIGHTS = [(kind, name, resource, verb) for kind, name in OPERATOR_ROLES for rule in installed(kind, name)["rules"]
          for resource in rule["resources"] for verb in rule["verbs"]]
# No request is made with these; without them, these are refused where owner references are enforced, as they are here.
UNUSED = {("schedexts/finalizers", "update"): {("daemonsets", "create"), ("daemonsets", "patch")}, ("daemonsets", "delete"): {("daemonsets", "patch")}}


def test_install_yaml_has_these_objects_in_this_order() -> None:
    assert [(obj["kind"], obj["metadata"]["name"], obj["metadata"].get("namespace")) for obj in MANIFESTS] == [
        ("Namespace", "sked-system", None), ("CustomResourceDefinition", "schedexts.sked.schedkit.io", None), ("PriorityClass", "sked-controller-manager", None),
        ("ServiceAccount", "sked-controller-manager", "sked-system"), ("ClusterRole", "sked-manager-role", None), ("ClusterRoleBinding", "sked-manager-rolebinding", None),
        ("Role", "sked-leader-election-role", "sked-system"), ("RoleBinding", "sked-leader-election-rolebinding", "sked-system"),
        ("ClusterRole", "sked-metrics-auth-role", None), ("ClusterRoleBinding", "sked-metrics-auth-rolebinding", None), ("ClusterRole", "sked-metrics-reader", None),
        ("ClusterRole", "sked-schedext-editor-role", None), ("ClusterRole", "sked-schedext-viewer-role", None), ("Deployment", "sked-controller-manager", "sked-system"),
        ("Service", "sked-controller-manager-metrics-service", "sked-system")]


def test_all_but_the_namespace_and_the_crd_goes_with_the_operators_label() -> None:
    label = {obj["kind"]: obj["metadata"]["labels"].get("app.kubernetes.io/component") for obj in MANIFESTS}
    assert [kind for kind, value in label.items() if value != "operator"] == ["Namespace", "CustomResourceDefinition"] and set(label.values()) == {None, "operator"}


def test_the_operators_rights_have_no_wildcard_and_no_secrets_nodes_or_schedexts_to_write() -> None:
    assert len(RIGHTS) == len(set(RIGHTS)) == 18 and not {"*", "secrets", "nodes"} & {word for right in RIGHTS for word in right}
    assert {verb for *_, resource, verb in RIGHTS if resource == "schedexts"} == {"list", "watch"}
    bound = [(obj["kind"], obj["roleRef"]["name"], subject["name"]) for obj in MANIFESTS if "roleRef" in obj for subject in obj["subjects"]]
    assert bound == [(f"{kind}Binding", name, "sked-controller-manager") for kind, name in OPERATOR_ROLES]


def test_looking_goes_with_the_built_in_view_and_editing_with_nothing() -> None:
    aggregated = {obj["metadata"]["name"]: label for obj in MANIFESTS for label in obj["metadata"]["labels"] if "aggregate" in label}
    assert aggregated == {"sked-schedext-viewer-role": "rbac.authorization.k8s.io/aggregate-to-view"}
    assert {verb for rule in installed("ClusterRole", "sked-schedext-viewer-role")["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert "create" in installed("ClusterRole", "sked-schedext-editor-role")["rules"][0]["verbs"]


@contextlib.contextmanager
def everything_at_once(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], set[tuple[str, str]]]]:
    """Lets sked do all that it ever does; gives the (resource, verb) of its requests that were allowed, or that were not."""
    monkeypatch.setattr(sked, "backoff", lambda failures, most: 0.05)
    monkeypatch.setattr(sked, "GATHER_SECONDS", 0.05)
    for name, labels in (("orphan", {"managed-by": "sked-controller"}), ("taken", {})):
        obj = sked.build_daemonset({"metadata": {"name": name, "namespace": "default"}, "spec": {"sched": IMAGE}})
        server.create({**obj, "metadata": {**obj["metadata"], "labels": labels}})
    for name in ("new", "orphan", "taken"):
        server.create(schedext(name))
    api = sked.Api(lambda: sked.load_configuration(str(server.kubeconfig("sked")), None))
    operator, elector = sked.Operator(api), sked.Elector(api, "sked-system")
    for attempt in (elector.take, elector.take, lambda: sked.Reviewer(api).status("Bearer admin")):
        with contextlib.suppress(sked.ApiError):
            attempt()
    thread = threading.Thread(target=operator.run)
    thread.start()
    try:
        yield lambda allowed: {(r.what, r.verb) for r in list(server.requests) if r.user == "sked" and (r.status != 403) is allowed}
    finally:
        operator.stop.set()
        thread.join(5)


def test_the_operator_uses_each_of_its_rights_and_needs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rights = {right[2:] for right in RIGHTS} - UNUSED.keys()
    with ApiServer() as server, everything_at_once(server, monkeypatch) as requests:
        eventually(lambda: requests(True) >= rights)
        eventually(lambda: {dig(obj, ".status.conditions[0].reason") for obj in server.list("schedexts")} == {"RollingOut", "NameTaken"})
        assert requests(True) == rights and requests(False) == set()


@pytest.mark.parametrize("kind, name, resource, verb", RIGHTS)
def test_without_any_one_of_its_rights_something_is_refused(monkeypatch: pytest.MonkeyPatch, kind: str, name: str, resource: str, verb: str) -> None:
    rules = [{**rule, "verbs": [each for each in rule["verbs"] if (resource, each) != (rule["resources"][0], verb)]} for rule in installed(kind, name)["rules"]]
    expected = UNUSED.get((resource, verb), {(resource, verb)})
    with ApiServer() as server:
        server.patch(f"{kind.lower()}s", "sked-system" if kind == "Role" else "", name, {"rules": rules})
        with everything_at_once(server, monkeypatch) as requests:
            eventually(lambda: requests(False) >= expected)
            assert requests(False) == expected


def test_the_operators_pod_passes_the_restricted_pod_security_standard() -> None:
    pod = installed("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers"} and not any("hostPort" in port for port in container["ports"])
    assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert [volume.keys() - {"name"} for volume in pod["volumes"]] == [{"emptyDir"}]


def test_the_deployment_runs_what_the_rest_expects() -> None:
    spec = installed("Deployment")["spec"]
    pod, manager = spec["template"]["spec"], spec["template"]["spec"]["containers"][0]
    args = sked.parse(manager["args"])
    assert (spec["replicas"], args.leader_elect, args.health_probe_bind_address, args.metrics_bind_address, args.metrics_secure) == (1, True, ":8081", ":8443", True)
    assert [manager[probe]["httpGet"] for probe in ("livenessProbe", "readinessProbe")] == [{"path": "/healthz", "port": 8081}, {"path": "/readyz", "port": 8081}]
    assert installed("Service")["spec"]["ports"][0]["targetPort"] == 8443 and {port["containerPort"] for port in manager["ports"]} == {8081, 8443}
    selector, labels = spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"]
    assert selector == installed("Service")["spec"]["selector"] == {"control-plane": "controller-manager"} and selector.items() <= labels.items()
    assert pod["priorityClassName"] == installed("PriorityClass")["metadata"]["name"] and pod["serviceAccountName"] == installed("ServiceAccount")["metadata"]["name"]
    assert (installed("ServiceAccount")["automountServiceAccountToken"], pod["automountServiceAccountToken"]) == (False, True)
    assert manager["resources"] == {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}


# ---------------------------------------------------------------- the image, and the files

INSTRUCTIONS = re.findall(r"^([A-Z]+) (.*)$", re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)), re.M)


def instruction(name: str) -> list[str]:
    return [rest for found, rest in INSTRUCTIONS if found == name]


def test_the_image_is_pinned_small_and_not_root() -> None:
    assert instruction("FROM") == ["python:3.13.14-slim-trixie"]
    assert instruction("USER") == ["65532:65532"] and INSTRUCTIONS.index(("USER", "65532:65532")) > max(i for i, (name, _) in enumerate(INSTRUCTIONS) if name == "RUN")
    assert json.loads(instruction("ENTRYPOINT")[0]) == ["python", "-m", "sked"] == installed("Deployment")["spec"]["template"]["spec"]["containers"][0]["command"]
    assert set(" ".join(instruction("EXPOSE")).split()) == {"8081", "8443"} and instruction("CMD") == []


def test_the_image_gets_only_the_dependency_of_the_operator() -> None:
    (chosen,) = [re.search(r"grep '(\S+)' /sked/requirements.txt\s+\| pip install", run)[1] for run in instruction("RUN") if "pip install" in run]
    requirements = (HERE / "requirements.txt").read_text().splitlines()
    assert [line for line in requirements if re.search(chosen, line)] == ["kubernetes>=37.0,<38"]
    assert [re.split("[<>=]", line)[0] for line in requirements] == ["kubernetes", "pytest", "pytest-mock"]


def test_docker_is_given_only_what_the_dockerfile_copies() -> None:
    copied = {source for line in instruction("COPY") for source in line.split()[:-1]}
    patterns = [line for line in (HERE / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert patterns[0] == "*" and {pattern.lstrip("!") for pattern in patterns[1:]} == copied == {"requirements.txt", "sked.py"}


def test_these_files_are_all_there_is() -> None:
    ignored = {line.strip("/") for line in (HERE / ".gitignore").read_text().splitlines()} | {".git"}
    assert {path.name for path in HERE.iterdir()} - ignored == {
        "sked.py", "test_sked.py", "requirements.txt", "install.yaml", "Dockerfile", ".dockerignore", "README.md", ".ci", ".gitignore"}
    assert {path.name for path in (HERE / ".ci").iterdir()} == {"run"}


# ---------------------------------------------------------------- python test_sked.py


def demo() -> None:
    """Shows what sked makes of a SchedExt, then serves until Ctrl-C and shows sked's log."""
    def show(command: str, text: str) -> None:
        print(f"\n$ {command}\n{text.rstrip()}", flush=True)

    with ApiServer() as server, OperatorProcess(server.kubeconfig("sked")) as operator:
        server.anonymous = "admin"
        Kubelets(server, nodes=3)
        print(f"This is an API server with three nodes, at {server.url}, and sked beside it.")
        server.create(applied := schedext("scx-rusty"))
        show("kubectl apply -f -", yaml.safe_dump(applied, sort_keys=False))
        daemonset = eventually(lambda: operator.process.poll() is not None or server.get("daemonsets", "default", "scx-rusty"), 30)
        if operator.process.poll() is None:
            spec = daemonset["spec"]["template"]["spec"]["containers"][0]
            show("kubectl get daemonset scx-rusty -o yaml   # in short", yaml.safe_dump({
                "metadata": {key: daemonset["metadata"][key] for key in ("name", "labels", "ownerReferences")},
                "spec": {"template": {"spec": {"containers": [{key: spec[key] for key in ("name", "image", "securityContext")}]}}}}, sort_keys=False))
            print("\nA scheduler that cannot attach ends within seconds, so sked waits a little to see that the pods stay up.", flush=True)
            eventually(lambda: dig(server.get("schedexts", "default", "scx-rusty"), '.status.conditions[?(@.type=="Ready")].status') == "True", 30)
            for resource in ("schedexts", "daemonsets", "pods"):
                show(f"kubectl get {resource}", print_table(make_table(server.resources[resource], server.list(resource, "default"), {})))
            show("kubectl get schedext scx-rusty -o yaml   # its status", yaml.safe_dump(
                {"status": server.get("schedexts", "default", "scx-rusty")["status"]}, sort_keys=False))
            print(f"\nTry it yourself:\n  export KUBECONFIG={server.kubeconfig('admin')}\n  kubectl get schedexts,daemonsets,pods\n"
                  "  kubectl patch schedext scx-rusty --type merge -p '{\"spec\": {\"sched\": \"ghcr.io/schedkit/scheds/scx_lavd:crash\"}}'\n"
                  "  kubectl describe schedext scx-rusty\n  kubectl delete schedext scx-rusty\n"
                  "Here the tag crash plays a scheduler that cannot attach, and nopull an image that is not there. Ctrl-C ends it.\n\n"
                  "The log of sked:")
        while operator.process.poll() is None:
            while operator.lines:
                print(operator.lines.pop(0), end="", flush=True)
            time.sleep(0.1)
        raise SystemExit("".join([*operator.lines, "sked has ended"]))


def bench(count: int) -> None:
    """Prints what so many SchedExts cost. There are no nodes: pods are the API server's and the kubelets' business."""
    with ApiServer() as server:
        Kubelets(server)
        for i in range(count):
            server.create(schedext(f"scx-{i}"))
        server.requests.clear()
        start = time.monotonic()
        with OperatorProcess(server.kubeconfig("sked")) as operator:
            eventually(lambda: len(server.objects["daemonsets"]) == count, 600)
            seconds = time.monotonic() - start
            eventually(lambda: all("status" in obj for obj in list(server.objects["schedexts"].values())), 60)
            quiet(server)
            cpu, memory = operator.usage()
            operator.stop()
        print(f"{count} SchedExts: all DaemonSets after {seconds:.1f} s; {1000 * cpu / count:.1f} ms of CPU per SchedExt; {memory:.0f} MiB resident")
        print("Requests per SchedExt:")
        for (verb, what, status), times in collections.Counter((r.verb, r.what, r.status) for r in server.requests if r.user == "sked").most_common():
            print(f"  {times / count:8.3f}  {verb} {what} ({status})")
        since = time.time()
        with OperatorProcess(server.kubeconfig("sked")) as operator:
            watched = {"schedexts", "daemonsets", "pods"}
            eventually(lambda: {r.what for r in list(server.requests) if r.time > since and r.verb == "watch"} >= watched, 60)
            time.sleep(10)  # longer than sked takes over anything
            quiet(server)
            cpu, memory = operator.usage()
        print(f"Restarted: {len(server.writes(since))} writes; {cpu:.1f} s of CPU; {memory:.0f} MiB resident")


def quiet(server: ApiServer, seconds: float = 3.0) -> None:
    """Returns when nothing has been written for so long."""
    eventually(lambda: not server.writes(time.time() - seconds), 600)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="See sked work on an API server of its own, or measure it. The tests are run by pytest.")
    parser.add_argument("what", nargs="?", choices=["bench"], help="print what N SchedExts cost")
    parser.add_argument("n", nargs="?", type=int, default=500, metavar="N")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        bench(args.n) if args.what else demo()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
