# The image that install.yaml runs:   docker build -t ghcr.io/schedkit/sked:1.1.0 .
# The base and all wheels exist for amd64 and arm64:
#                    docker buildx build --platform linux/amd64,linux/arm64 -t ghcr.io/schedkit/sked:1.1.0 --push .
FROM python:3.13-slim

LABEL org.opencontainers.image.title="sked" \
      org.opencontainers.image.description="Runs sched_ext schedulers on Kubernetes nodes" \
      org.opencontainers.image.source="https://github.com/schedkit/sked" \
      org.opencontainers.image.version="1.1.0"

# Only what sked.py needs at run time, not the tests' tools; and pip is not needed any more.
# No bytecode here: that of kubernetes' API classes alone would be 44 MB, and sked loads none of it.
COPY requirements.txt /sked/
RUN grep '^kubernetes' /sked/requirements.txt \
    | pip install --no-cache-dir --no-compile --root-user-action=ignore --disable-pip-version-check -r /dev/stdin \
 && pip uninstall --yes --root-user-action=ignore pip

# Bytecode for exactly the modules that sked loads: that saves nearly two seconds at every start, and on a read-only
# file system Python could not keep its own. Unchecked: it counts whatever the files' times are.
# The self-signed certificate of the metrics takes the openssl program: better to miss it now.
ENV PYTHONPATH=/sked
COPY sked.py /sked/
RUN chmod -R a+rX /sked \
 && openssl version \
 && python -c 'import py_compile, sys, sked; [ \
        py_compile.compile(m.__file__, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH) \
        for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").endswith(".py")]'

# A number, for the kubelet cannot tell whether a name is root. Any other will do: nothing here belongs to it.
USER 65532:65532
EXPOSE 8081 8443
# No shell in between: Python gets the SIGTERM itself. As a module, for a script's own bytecode would not be used.
ENTRYPOINT ["python", "-m", "sked"]
