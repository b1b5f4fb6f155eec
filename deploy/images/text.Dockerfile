# A text instance: prefill and decode. It has the same packages as the encoder, in the same layers.
#   docker build -f deploy/images/text.Dockerfile -t triptych-text .
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
COPY deploy/images/requirements/instance.txt .
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=ca.pem \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/triptych/bin/pip install --quiet --no-deps --require-hashes --requirement instance.txt
# The build of torch, and the index to take it from. Empty: as pip is configured.
ARG TORCH=torch
ARG TORCH_INDEX=
COPY deploy/images/requirements/constraints.txt .
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=ca.pem \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/triptych/bin/pip install --quiet --constraint constraints.txt ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "${TORCH}" \
    && /opt/triptych/bin/pip check && /opt/triptych/bin/pip uninstall --quiet --yes pip

FROM ${PYTHON}
LABEL org.opencontainers.image.title="triptych-text" org.opencontainers.image.licenses="Apache-2.0"
# What compiles kernels for a GPU at start, as triton does: "gcc libc6-dev".
ARG PACKAGES=
RUN if [ -n "${PACKAGES}" ]; then apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/*; fi
RUN useradd --uid 10001 --home-dir /tmp --shell /usr/sbin/nologin triptych \
    && install --directory --owner 10001 --group 10001 /models
COPY --from=packages /opt/triptych /opt/triptych
COPY --from=code /code /opt/triptych
COPY deploy/images/ready.py /opt/triptych/ready.py
ENV PATH=/opt/triptych/bin:$PATH HOME=/tmp HF_HOME=/models TRIPTYCH_TEXT_ADMIN_PORT=9100 TRIPTYCH_TEXT_LOG_FORMAT=json
USER 10001:10001
EXPOSE 50071 9100
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s --retries=3 \
    CMD ["/opt/triptych/bin/python", "-I", "-S", "/opt/triptych/ready.py"]
ENTRYPOINT ["/opt/triptych/bin/python", "-m", "triptych.services.text"]
