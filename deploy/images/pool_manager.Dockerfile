# The pool manager, and the `triptych` command to operate a cluster with.
#   docker build -f deploy/images/pool_manager.Dockerfile -t triptych-pool-manager .
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS code
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python3 -m venv /opt/triptych
COPY deploy/images/requirements/build.txt .
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=ca.pem \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/triptych/bin/pip install --quiet --no-deps --require-hashes --requirement build.txt
COPY LICENSE README.md pyproject.toml ./
COPY src src
COPY services services
RUN /opt/triptych/bin/pip install --quiet --no-deps --no-build-isolation --prefix /code .

FROM ${PYTHON} AS packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python3 -m venv /opt/triptych
COPY deploy/images/requirements/pool_manager.txt .
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=ca.pem \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/triptych/bin/pip install --quiet --no-deps --require-hashes --requirement pool_manager.txt \
    && /opt/triptych/bin/pip check && /opt/triptych/bin/pip uninstall --quiet --yes pip

FROM ${PYTHON}
LABEL org.opencontainers.image.title="triptych-pool-manager" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --home-dir /tmp --shell /usr/sbin/nologin triptych
COPY --from=packages /opt/triptych /opt/triptych
COPY --from=code /code /opt/triptych
COPY deploy/images/ready.py /opt/triptych/ready.py
ENV PATH=/opt/triptych/bin:$PATH HOME=/tmp TRIPTYCH_POOL_MANAGER_ADMIN_PORT=9100 TRIPTYCH_POOL_MANAGER_LOG_FORMAT=json
USER 10001:10001
EXPOSE 50041 9100
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s --retries=3 \
    CMD ["/opt/triptych/bin/python", "-I", "-S", "/opt/triptych/ready.py"]
ENTRYPOINT ["/opt/triptych/bin/python", "-m", "triptych.services.pool_manager"]
