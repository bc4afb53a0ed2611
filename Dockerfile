# The image that install.yaml runs:   docker build -t ghcr.io/schedkit/sked:1.4.0 .
# For amd64 and arm64 (the base image and all wheels exist for both):
#                    docker buildx build --platform linux/amd64,linux/arm64 -t ghcr.io/schedkit/sked:1.4.0 --push .
# The tag is rebuilt when Debian's packages change. To build on exactly the same base every time, pin its digest as well:
#                    docker buildx imagetools inspect python:3.13.14-slim-trixie     # prints the digest
#                    FROM python:3.13.14-slim-trixie@sha256:...
FROM python:3.13.14-slim-trixie

LABEL org.opencontainers.image.title="sked" \
      org.opencontainers.image.description="Runs sched_ext schedulers on Kubernetes nodes" \
      org.opencontainers.image.source="https://github.com/schedkit/sked" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="1.4.0"

# Only what sked.py needs at run time: used as constraints, requirements.txt pins versions but does not install the test tools.
# pip is not needed afterwards, and neither are the generated classes of the kubernetes package, 73 MB that sked never loads.
# No bytecode yet: see below.
COPY requirements.txt /sked/
WORKDIR /usr/local/lib/python3.13/site-packages/
RUN pip install --no-cache-dir --no-compile --root-user-action=ignore --disable-pip-version-check \
        --constraint /sked/requirements.txt kubernetes \
 && pip uninstall --yes --root-user-action=ignore pip \
 && rm -r kubernetes/aio kubernetes/client/api \
 && find kubernetes/client/models -type f ! -name __init__.py -delete

# The build fails if sked does not start without those classes, or if openssl is missing, which makes the metrics' self-signed certificate.
WORKDIR /sked/
COPY sked.py ./
RUN chmod -R a+rX . \
 && python -m sked --help \
 && openssl version

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
