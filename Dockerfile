# The image that install.yaml runs:   docker build -t ghcr.io/schedkit/sked:1.3.0 .
# For amd64 and arm64 (the base image and all wheels exist for both):
#                    docker buildx build --platform linux/amd64,linux/arm64 -t ghcr.io/schedkit/sked:1.3.0 --push .
FROM python:3.13-slim

LABEL org.opencontainers.image.title="sked" \
      org.opencontainers.image.description="Runs sched_ext schedulers on Kubernetes nodes" \
      org.opencontainers.image.source="https://github.com/schedkit/sked" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="1.3.0"

# Only what sked.py needs at run time: used as constraints, requirements.txt pins versions but does not install the test tools.
# pip is not needed afterwards, and neither are the generated classes of the kubernetes package, 73 MB that sked never loads.
# No bytecode yet: see below.
COPY requirements.txt /sked/
RUN pip install --no-cache-dir --no-compile --root-user-action=ignore --disable-pip-version-check \
        --constraint /sked/requirements.txt kubernetes \
 && pip uninstall --yes --root-user-action=ignore pip \
 && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kubernetes" \
 && rm -r aio client/api \
 && find client/models -type f ! -name __init__.py -delete

# The build fails if sked no longer starts without those classes, or cannot log in in one of the ways that it supports: with a token, with a
# client certificate, with a kubeconfig's plugin, and with the service account of its pod. This also finds out whether openssl is there,
# which makes the metrics' self-signed certificate.
ENV PYTHONPATH=/sked
COPY sked.py /sked/
RUN chmod -R a+rX /sked \
 && python -m sked --help >/dev/null \
 && python -c 'import os, sked; \
        from kubernetes.config import incluster_config as pod; \
        folder = sked.self_signed(); \
        config, token, crt, key = [f"{folder}/{name}" for name in ("config", "token", "tls.crt", "tls.key")]; \
        version = "client.authentication.k8s.io/v1"; \
        answer = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": "plugin"}}; \
        plugin = {"apiVersion": version, "command": "echo", "args": [sked.json.dumps(answer)]}; \
        users = { \
            "token": {"token": "file"}, \
            "certificate": {"client-certificate": crt, "client-key": key}, \
            "plugin": {"exec": plugin}}; \
        open(config, "w").write(sked.json.dumps({ \
            "clusters": [{"name": "c", "cluster": {"server": "https://c"}}], \
            "contexts": [{"name": name, "context": {"cluster": "c", "user": name}} for name in users], \
            "users": [{"name": name, "user": user} for name, user in users.items()]})); \
        open(token, "w").write("pod"); \
        pod.SERVICE_TOKEN_FILENAME, pod.SERVICE_CERT_FILENAME = token, crt; \
        os.environ.update(KUBERNETES_SERVICE_HOST="c", KUBERNETES_SERVICE_PORT="443", KUBECONFIG=""); \
        ways = [(config, "token"), (config, "certificate"), (config, "plugin"), (None, None)]; \
        got = [sked.Api(lambda: sked.load_configuration(*way)).authorization() for way in ways]; \
        assert [way.get("Authorization", "").lower() for way in got] == ["bearer file", "", "bearer plugin", "bearer pod"], got'

# Bytecode for exactly the modules that sked loads. It saves nearly two seconds at every start, because Python cannot write its
# own on a read-only file system. Unchecked, so that it is valid whatever the files' timestamps are.
RUN python -c 'import py_compile, sys, sked; [ \
        py_compile.compile(m.__file__, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH) \
        for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").endswith(".py")]'

# A number, because the kubelet cannot tell whether a name is root. Any uid works: no file here belongs to this one.
USER 65532:65532
EXPOSE 8081 8443
# No shell in between, so Python gets SIGTERM itself. As a module, because Python ignores the bytecode of a script.
ENTRYPOINT ["python", "-m", "sked"]
