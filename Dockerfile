# The image that install.yaml runs:   docker build -t ghcr.io/schedkit/sked:1.2.0 .
# For amd64 and arm64 (the base image and all wheels exist for both):
#                    docker buildx build --platform linux/amd64,linux/arm64 -t ghcr.io/schedkit/sked:1.2.0 --push .
FROM python:3.13-slim

LABEL org.opencontainers.image.title="sked" \
      org.opencontainers.image.description="Runs sched_ext schedulers on Kubernetes nodes" \
      org.opencontainers.image.source="https://github.com/schedkit/sked" \
      org.opencontainers.image.version="1.2.0"

# Only what sked.py needs at run time: used as constraints, requirements.txt pins versions but does not install the test tools.
# No bytecode yet: for kubernetes' API classes alone it would take 44 MB, and sked never loads them. pip itself is not needed afterwards.
COPY requirements.txt /sked/
RUN pip install --no-cache-dir --no-compile --root-user-action=ignore --disable-pip-version-check \
        --constraint /sked/requirements.txt kubernetes \
 && pip uninstall --yes --root-user-action=ignore pip

# Bytecode for exactly the modules that sked loads. It saves nearly two seconds at every start, because Python cannot write its
# own on a read-only file system. Unchecked, so that it is valid whatever the files' timestamps are.
# The metrics' self-signed certificate needs the openssl program: if it is missing, fail the build.
ENV PYTHONPATH=/sked
COPY sked.py /sked/
RUN chmod -R a+rX /sked \
 && openssl version \
 && python -c 'import py_compile, sys, sked; [ \
        py_compile.compile(m.__file__, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH) \
        for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").endswith(".py")]'

# A number, because the kubelet cannot tell whether a name is root. Any uid works: no file here belongs to this one.
USER 65532:65532
EXPOSE 8081 8443
# No shell in between, so Python gets SIGTERM itself. As a module, because Python ignores the bytecode of a script.
ENTRYPOINT ["python", "-m", "sked"]
