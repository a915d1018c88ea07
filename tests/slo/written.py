"""SLO documents as a team might write them, and what is read of one."""

from __future__ import annotations

from pathlib import Path

from prefixwatch.alerts.build import known_metrics
from prefixwatch.slo.build import load_slos
from prefixwatch.slo.rule_model import SloDefinition

FOREIGN = """\
apiVersion: openslo/v1
kind: SLO
metadata:
  name: web-availability
  annotations:
    other.example/owner: team-web
spec:
  service: web
  indicatorRef: web-success
  timeWindow:
    - duration: 28d
      isRolling: true
  budgetingMethod: Occurrences
  objectives:
    - target: 0.99
  alertPolicies:
    - web-burn
---
apiVersion: openslo/v1
kind: SLI
metadata:
  name: web-success
spec:
  ratioMetric:
    counter: true
    bad:
      metricSource:
        metricSourceRef: our-prometheus
        spec:
          query: sum(rate(http_requests_total{code=~"5.."}[{{.window}}]))
    total:
      metricSource:
        metricSourceRef: our-prometheus
        spec:
          query: sum(rate(http_requests_total[5m]))
---
apiVersion: openslo/v1
kind: DataSource
metadata:
  name: our-prometheus
spec:
  type: Prometheus
  connectionDetails:
    url: http://prometheus.example
---
apiVersion: openslo/v1
kind: AlertPolicy
metadata:
  name: web-burn
spec:
  alertWhenBreaching: true
  conditions:
    - conditionRef: fast
  notificationTargets:
    - targetRef: on-call
---
apiVersion: openslo/v1
kind: AlertCondition
metadata:
  name: fast
spec:
  severity: page
  condition:
    kind: burnrate
    op: gte
    threshold: 10
    lookbackWindow: 2h
    alertAfter: 5m
---
apiVersion: openslo/v1
kind: AlertNotificationTarget
metadata:
  name: on-call
spec:
  target: email
"""


def write(folder: Path, text: str, name: str = "own.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def one(folder: Path, text: str) -> SloDefinition:
    [definition] = load_slos([write(folder, text)], known_metrics())
    return definition
