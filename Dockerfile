# The whole stack:      docker build -t prefixwatch . && docker run --rm -p 8000:8000 -p 9477:9477 prefixwatch
# The exporter alone:   docker build -t prefixwatch-exporter --build-arg LOCK=requirements-core.lock .
#                       docker run --rm -p 9477:9477 prefixwatch-exporter exporter --listen 0.0.0.0:9477 --target URL
FROM python:3.12-slim
ARG LOCK=requirements.lock
RUN if [ "$LOCK" = requirements.lock ]; then \
      apt-get update && apt-get install -y --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/*; \
    fi \
 && useradd --no-create-home prefixwatch && install -d -o prefixwatch /data
WORKDIR /opt/prefixwatch
COPY requirements*.lock ./
RUN pip install --no-cache-dir --require-hashes -r "$LOCK"
COPY . .
RUN pip install --no-cache-dir --no-deps .
USER prefixwatch
WORKDIR /data
EXPOSE 8000 9477 9090
ENTRYPOINT ["prefixwatch"]
CMD ["up", "--host", "0.0.0.0"]
