# The pool manager, and the `triptych` command to operate a cluster with.
#   docker build -f deploy/images/pool_manager.Dockerfile -t triptych-pool-manager .
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS code
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python3 -m venv /opt/triptych
COPY LICENSE README.md pyproject.toml ./
COPY src src
COPY services services
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=ca.pem \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/triptych/bin/pip install --quiet --no-deps --prefix /code .

# What is to be installed, without the settings of tools, so that their changes do not install it again.
FROM ${PYTHON} AS project
COPY pyproject.toml .
RUN sed -i '/^\[dependency-groups\]/,$d' pyproject.toml

FROM ${PYTHON} AS packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python3 -m venv /opt/triptych
COPY --from=project pyproject.toml .
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=ca.pem \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    mkdir -p src/triptych && touch LICENSE README.md src/triptych/__init__.py \
    && /opt/triptych/bin/pip install --quiet '.[cli,kubernetes,redis,service,telemetry]' \
    && /opt/triptych/bin/pip uninstall --quiet --yes triptych pip

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
