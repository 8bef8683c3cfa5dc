"""``examples/deploy/`` and ``examples/monitoring``: schemas, and names that several files share.

``make workflows`` lints ``docker/Dockerfile``.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonpatch
import jsonschema
import pytest
import yaml
from pyspark.sql import SparkSession

import nats_stream_source
from examples.deploy import follow_bucket
from nats_stream_source.cli import follow
from nats_stream_source.cli.options import connection
from nats_stream_source.metrics.table import METRICS, PREFIX
from tests.integration.delta.merge_model import stored
from tests.support.nats.buckets import create_bucket, delete, put_many
from tests.support.paths import ROOT
from tests.support.program import ran
from tests.support.prometheus import DASHBOARD, MONITORING, needs_prometheus, panel_queries, rules

DEPLOY = ROOT / "examples/deploy"
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()


def schema(name: str) -> dict[str, Any]:
    loaded = json.loads(Path(__file__).with_name("schemas").joinpath(f"{name}.json").read_text())
    assert isinstance(loaded, dict)
    return loaded


KUBERNETES = schema("kubernetes")
APPLICATION = schema("spark_application")


def documents(name: str) -> dict[str, Any]:
    """The documents of a file, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / name).read_text())}


def base() -> dict[str, Any]:
    return documents("kubernetes/base/follower.yaml") | documents("kubernetes/base/metrics.yaml")


def settings(overlay: str) -> dict[str, str]:
    """The literals of the ConfigMap of a kustomization."""
    (generated,) = documents(f"kubernetes/{overlay}/kustomization.yaml")["Kustomization"][
        "configMapGenerator"
    ]
    return dict(literal.split("=", 1) for literal in generated["literals"])


def in_s3() -> dict[str, Any]:
    """The StatefulSet with the patch of the overlay ``s3``."""
    (patch,) = documents("kubernetes/s3/kustomization.yaml")["Kustomization"]["patches"]
    found: dict[str, Any] = jsonpatch.apply_patch(
        base()["StatefulSet"], yaml.safe_load(patch["patch"])
    )
    return found


def validate(kind: str, value: Any) -> None:
    jsonschema.validate(value, {**KUBERNETES, "$ref": f"#/$defs/{kind}"})


def test_kubernetes_objects_match_schemas() -> None:
    for kind, value in {**base(), "StatefulSet": in_s3()}.items():
        validate(kind, value)
    application = documents("spark-application.yaml")
    validate("PersistentVolumeClaim", application["PersistentVolumeClaim"])
    jsonschema.validate(application["SparkApplication"], APPLICATION)
    for volume in application["SparkApplication"]["spec"]["volumes"]:
        validate("Volume", volume)


def test_misspelt_field_does_not_match_schema() -> None:
    """The schemas refuse what an API server refuses or drops."""
    value = copy.deepcopy(base()["StatefulSet"])
    value["spec"]["template"]["spec"]["securityContext"]["runAsNonroot"] = True
    with pytest.raises(jsonschema.ValidationError):
        validate("StatefulSet", value)
    application = documents("spark-application.yaml")["SparkApplication"]
    application["spec"]["driver"]["memoryOverhed"] = "1g"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(application, APPLICATION)


def test_kubernetes_names_agree() -> None:
    objects, service = base(), base()["Service"]
    spec = objects["StatefulSet"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert spec["serviceName"] == service["metadata"]["name"]
    (port,) = container["ports"]
    assert {port["name"]} == {
        container["readinessProbe"]["httpGet"]["port"],
        service["spec"]["ports"][0]["targetPort"],
    }
    assert service["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    volumes = {one["name"] for one in pod["volumes"]}
    volumes |= {one["metadata"]["name"] for one in spec["volumeClaimTemplates"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    kustomization = documents("kubernetes/base/kustomization.yaml")["Kustomization"]
    (image,) = kustomization["images"]
    assert image["name"] == container["image"]
    (config,) = (one["configMapRef"]["name"] for one in container["envFrom"])
    assert [one["name"] for one in kustomization["configMapGenerator"]] == [config]


def test_credentials_are_mounted_where_variable_names_them() -> None:
    pod = base()["StatefulSet"]["spec"]["template"]["spec"]
    mounts = {one["name"]: one for one in pod["containers"][0]["volumeMounts"]}
    (secret,) = (one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one)
    mount = mounts["credentials"]
    # kubelet replaces the files of a directory, and not those of a subPath.
    assert mount.keys() == {"name", "mountPath", "readOnly"}
    (path,) = (one["value"] for one in pod["containers"][0]["env"] if one["name"] == "NATS_CREDS")
    create = f"kubectl create secret generic {secret} --from-file={Path(path).name}\n"
    assert str(Path(path).parent) == mount["mountPath"]
    assert create in (ROOT / "docs/production.md").read_text()
    assert create in (DEPLOY / "kubernetes/base/kustomization.yaml").read_text()
    application = documents("spark-application.yaml")["SparkApplication"]["spec"]
    for part in (application["driver"], application["executor"]):
        assert {"name": "NATS_CREDS", "value": path} in part["env"]
        assert [(one["name"], one["path"]) for one in part["secrets"]] == [
            (secret, mount["mountPath"])
        ]


@pytest.mark.parametrize("overlay", ["base", "s3"])
def test_follower_accepts_arguments(overlay: str) -> None:
    """Kubernetes replaces $(NAME) by the variable; the command parses what follows."""
    values = settings("base") | (settings("s3") if overlay == "s3" else {})
    stateful = base()["StatefulSet"] if overlay == "base" else in_s3()
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    given = [
        re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], one) for one in container["args"]
    ]
    command, *arguments = given
    assert command == "follow"
    parser = argparse.ArgumentParser()
    follow.add_arguments(parser)
    parsed = parser.parse_args(arguments, argparse.Namespace(context=None))
    assert parsed.table == values["TABLE"]
    environment = {one["name"]: one["value"] for one in container["env"]} | values
    options = connection(parsed, environment)
    assert options == {
        "servers": values["NATS_URL"],
        "credentials": environment["NATS_CREDS"],
    }


def test_follow_program_accepts_arguments() -> None:
    application = documents("spark-application.yaml")["SparkApplication"]["spec"]
    given = follow_bucket.parser().parse_args(application["arguments"])
    (mount,) = application["driver"]["volumeMounts"]
    for path in (given.table, given.checkpoint):
        assert path.startswith(f"{mount['mountPath']}/")
    cores = application["executor"]["instances"] * application["executor"]["cores"]
    assert f"minPartitions={cores}" in given.option
    assert {one["name"] for one in application["driver"]["env"]} <= follow_bucket.VARIABLES.keys()
    assert [one["containerPort"] for one in application["driver"]["ports"]] == [given.prometheus]
    bundle = yaml.safe_load((DEPLOY / "databricks.yml").read_text())
    (job,) = bundle["resources"]["jobs"].values()
    (task,) = job["tasks"]
    program = task["spark_python_task"]
    assert (DEPLOY / program["python_file"]).is_file()
    follow_bucket.parser().parse_args(program["parameters"])
    (cluster,) = job["job_clusters"]
    assert cluster["job_cluster_key"] == task["job_cluster_key"]
    assert cluster["new_cluster"]["spark_env_vars"].keys() <= follow_bucket.VARIABLES.keys()
    used = set(re.findall(r"\$\{var\.(\w+)\}", (DEPLOY / "databricks.yml").read_text()))
    assert used == bundle["variables"].keys()


def test_versions_and_users_agree() -> None:
    application = documents("spark-application.yaml")["SparkApplication"]["spec"]
    (image,) = documents("kubernetes/base/kustomization.yaml")["Kustomization"]["images"]
    version = nats_stream_source.__version__
    assert image["newTag"] == version == application["image"].rpartition(":")[2]
    spark = application["sparkVersion"]
    assert f"\nARG SPARK={spark}-" in DOCKERFILE
    assert f'"pyspark[pipelines]=={spark}"' in (ROOT / "pyproject.toml").read_text()
    users = dict(re.findall(r"AS (\w+)\n(?:[^F].*\n|\n)*?USER (\d+):\d+\n", DOCKERFILE))
    pod = base()["StatefulSet"]["spec"]["template"]["spec"]["securityContext"]
    assert users["follower"] == str(pod["runAsUser"]) == str(pod["fsGroup"])
    for part in (application["driver"], application["executor"]):
        assert users["spark"] == str(part["securityContext"]["runAsUser"])


@pytest.mark.delta
def test_follow_program_follows(spark: SparkSession, url: str, tmp_path: Path) -> None:
    create_bucket(url, "fleet")
    put_many(url, "fleet", [("plane.1", b"EWR"), ("plane.2", b"JFK")])
    arguments = ["fleet", str(tmp_path / "table"), str(tmp_path / "checkpoint"), "--once"]
    environment = {"NATS_URL": url}
    follow_bucket.main([*arguments, "--option", "keys=plane.>"], environment)
    delete(url, "fleet", "plane.1")
    follow_bucket.main([*arguments, "--option", "keys=plane.>"], environment)
    assert [row["key"] for row in stored(tmp_path / "table")] == ["plane.2"]


def test_dashboard_is_written_by_its_script() -> None:
    done = ran(sys.executable, MONITORING / "dashboard.py")
    assert (done.stdout, done.stderr) == (DASHBOARD.read_text(), "")


def test_dashboard_and_rules_name_metrics_of_table() -> None:
    names = {one.full_name: one.kind for one in METRICS.values()}
    suffixes = {"counter": {""}, "gauge": {""}, "histogram": {"_bucket", "_sum", "_count"}}
    known = {name + suffix for name, kind in names.items() for suffix in suffixes[kind]}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    expressions = [*panel_queries().values(), *(rule["expr"] for rule in rules())]
    for expression in expressions:
        used = set(re.findall(rf"(?<![:\w]){PREFIX}\w+", expression))
        assert used <= known, expression
        assert set(re.findall(r"\w+:\w+(?::\w+)?", expression)) <= recorded


@needs_prometheus
def test_rules_of_promtool() -> None:
    ran("promtool", "test", "rules", "rules_test.yml", cwd=MONITORING)
    tested = set(re.findall(r"alertname: (\w+)", (MONITORING / "rules_test.yml").read_text()))
    assert tested == {rule["alert"] for rule in rules() if "alert" in rule}


def test_configuration_names_port_of_documentation() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:9464"]}]
    assert "prometheus=9464" in (ROOT / "docs" / "operations.md").read_text()
