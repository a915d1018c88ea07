# The whole stack in one image: `docker run --rm -p 8000:8000 -p 9477:9477 prefixwatch up`
FROM python:3.12-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends prometheus \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --no-create-home prefixwatch && install -d -o prefixwatch /data
WORKDIR /opt/prefixwatch
COPY requirements.lock ./
RUN pip install --no-cache-dir --require-hashes -r requirements.lock
COPY . .
RUN pip install --no-cache-dir --no-deps .
USER prefixwatch
WORKDIR /data
EXPOSE 8000 9477 9090
ENTRYPOINT ["prefixwatch"]
CMD ["up", "--host", "0.0.0.0"]
