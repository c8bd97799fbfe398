# syntax=docker/dockerfile:1.7
# Three stages: packages are installed in `build`; `service` is the API, without a compiler; `worker` adds what trials need.

FROM python:3.12.12-slim-trixie AS build
# Packages come from the index that pip is configured with, or from another: --build-arg PIP_INDEX_URL=…. One with wheels
# of torch for the CPU alone, which are smaller, can be named beside it: --build-arg TORCH_INDEX=….
ARG PIP_INDEX_URL
ARG TORCH_INDEX
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/steptune
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN /opt/steptune/bin/pip install --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0
COPY src src
COPY tuner tuner
COPY service service
COPY dashboards dashboards
COPY kernels kernels
COPY migrations migrations
COPY examples examples
# The version comes from Git, which is not copied: --build-arg SETUPTOOLS_SCM_PRETEND_VERSION_FOR_STEPTUNE=1.2.3.
ARG SETUPTOOLS_SCM_PRETEND_VERSION_FOR_STEPTUNE
# What of pyproject.toml's extras comes along: the zoo needs `transformers` and `timm`, the state of GPUs `cuda`; workers on
# a Ray cluster need `ray`, too (kuberay.yml).
ARG EXTRAS=torch,postgresql,s3,oidc,transformers,timm,cuda
RUN /opt/steptune/bin/pip install --constraint constraints.txt ".[$EXTRAS]"

FROM python:3.12.12-slim-trixie AS service
RUN apt-get update \
    && apt-get install -y --no-install-recommends postgresql-client \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --user-group --home-dir /var/lib/steptune --shell /usr/sbin/nologin steptune \
    && install --directory --owner steptune --group steptune --mode 0711 /var/lib/steptune
COPY --from=build /opt/steptune /opt/steptune
ENV PATH=/opt/steptune/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    STEPTUNE_DATA_DIRECTORY=/var/lib/steptune HOME=/tmp
WORKDIR /var/lib/steptune
USER 10001:10001
ENTRYPOINT ["steptune"]
CMD ["serve", "--host", "0.0.0.0", "--no-worker"]

FROM service AS worker
USER root
# g++ for torch.compile on the CPU; bubblewrap where the host lets containers use it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ \
    && rm -rf /var/lib/apt/lists/*
# What workloads import beside torch, as pip names it: --build-arg PACKAGES="einops monai==1.5". It changes no package that
# is there.
ARG PACKAGES
RUN test -z "$PACKAGES" || { pip freeze --exclude steptune >/tmp/kept.txt \
    && pip install --no-cache-dir --constraint /tmp/kept.txt $PACKAGES \
    && rm /tmp/kept.txt; }
# Started as root, it becomes the service's user and keeps what it takes to run trials as users of their own.
ENTRYPOINT ["setpriv", "--reuid", "10001", "--regid", "10001", "--clear-groups", "--inh-caps=-all,+chown,+kill,+setgid,+setuid", "--ambient-caps=+chown,+kill,+setgid,+setuid", "--", "steptune"]
CMD ["worker"]
