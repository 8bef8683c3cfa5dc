"""Extract the JSON schemas that ``examples/deploy/`` is validated by, without descriptions.

``spark_application.json`` comes from the CRD of the Spark operator (Apache License 2.0),
``config/crd/bases/sparkoperator.k8s.io_sparkapplications.yaml`` of the Go module
``github.com/kubeflow/spark-operator/v2``. ``kubernetes.json`` comes from the definitions of the
package ``kubernetes-validate`` (Apache License 2.0), ``v…-local-strict/_definitions.json``. Both
refuse unknown fields, which an API server would drop, and accept any value for the fields in
``_ANY``, which the examples do not use.

Run: python -m tests.integration.project.extract_schemas CRD VERSION DEFINITIONS VERSION
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).with_name("schemas")
_ANY = {
    *("affinity", "dnsConfig", "driverIngressOptions", "ephemeralContainers", "hostAliases"),
    *("initContainers", "lifecycle", "managedFields", "sidecars", "status", "template"),
    *("batchSchedulerOptions", "topologySpreadConstraints", "windowsOptions", "resourceClaims"),
}
_VOLUMES = {"name", "configMap", "emptyDir", "persistentVolumeClaim", "secret"}
_KINDS = {
    "StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
    "Service": "io.k8s.api.core.v1.Service",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "Volume": "io.k8s.api.core.v1.Volume",
}
_REFERENCE = "/api/_definitions.json#/$defs/"


def closed(schema: dict[str, Any], any_value: set[str]) -> dict[str, Any]:
    """The schema without descriptions and without unknown fields."""
    left_out = ("description", "x-kubernetes-group-version-kind")
    kept = {name: value for name, value in schema.items() if name not in left_out}
    if "$ref" in kept:
        return {"$ref": kept["$ref"].replace(_REFERENCE, "#/$defs/")}
    for name in ("items", "additionalProperties"):
        if isinstance(part := kept.get(name), dict):
            kept[name] = closed(part, any_value)
    if properties := kept.get("properties"):
        kept["additionalProperties"] = False
        if "persistentVolumeClaim" in properties:
            any_value = any_value | (properties.keys() - _VOLUMES)
        kept["properties"] = {
            name: {} if name in any_value else closed(one, any_value)
            for name, one in properties.items()
        }
    return kept


def of_crd(crd: dict[str, Any], version: str) -> dict[str, Any]:
    """The schema of the version that the CRD serves."""
    (served,) = crd["spec"]["versions"]
    schema = closed(served["schema"]["openAPIV3Schema"], _ANY)
    schema["properties"]["metadata"] = {}
    schema["properties"]["apiVersion"] = {"const": f"{crd['spec']['group']}/{served['name']}"}
    comment = f"kubeflow/spark-operator {version}, Apache License 2.0, by extract_schemas.py"
    return {"$comment": comment, **schema}


def of_kubernetes(definitions: dict[str, Any], version: str) -> dict[str, Any]:
    """The definitions of the kinds in ``_KINDS``, and those that they refer to."""
    any_value = _ANY - {"template"}
    found: dict[str, Any] = {}
    missing = list(_KINDS.values())
    while missing:
        name = missing.pop()
        found[name] = closed(definitions[name], any_value)
        text = json.dumps(found[name])
        named = {part.partition('"')[0] for part in text.split("#/$defs/")[1:]}
        missing += named - found.keys() - set(missing)
    kinds = {kind: {"$ref": f"#/$defs/{name}"} for kind, name in _KINDS.items()}
    comment = f"Kubernetes {version}, Apache License 2.0, by extract_schemas.py"
    return {"$comment": comment, "$defs": {**found, **kinds}}


def main() -> None:
    """Write both extracts."""
    crd, operator, definitions, kubernetes = sys.argv[1:]
    write("spark_application", of_crd(yaml.safe_load(Path(crd).read_text()), operator))
    loaded = json.loads(Path(definitions).read_text())
    write("kubernetes", of_kubernetes(loaded["$defs"], kubernetes))


def write(name: str, schema: dict[str, Any]) -> None:
    """Write an extract."""
    text = json.dumps(schema, indent=1, sort_keys=True)
    SCHEMAS.joinpath(f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
