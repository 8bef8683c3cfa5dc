"""Writes the Grafana dashboard: ``python examples/monitoring/dashboard.py`` prints its JSON.

``nats-stream-source.json`` beside it is the result, to import into Grafana 11 or newer; a test
compares both. Requires ``grafana-foundation-sdk``.
"""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_QUERY = 'query=~"$query"'


@dataclass(frozen=True)
class Panel:
    """A panel: its queries by the legend of their series.

    Attributes:
        unit: of Grafana.
        queries: PromQL by legend; ``{Q`` begins the selection of queries,
            and ``$__rate_interval``
            is Grafana's.
    """

    title: str
    unit: str
    description: str
    queries: dict[str, str]


_P = "nats_stream_source_"


def _rate(name: str, *by: str) -> str:
    return f"sum by ({', '.join(('query', *by))}) (rate({_P}{name}_total{{Q}}[$__rate_interval]))"


def _or_zero(expression: str) -> str:
    # An event that never happened has no series: show 0 instead of "No data".
    return f"{expression} or vector(0)"


def _quantile(quantile: float, name: str, *by: str, where: str = "") -> str:
    labels = ", ".join(("query", *by, "le"))
    selection = f"Q,{where}" if where else "Q"
    buckets = f"rate({_P}{name}_bucket{{{selection}}}[$__rate_interval])"
    return f"histogram_quantile({quantile}, sum by ({labels}) ({buckets}))"


_STEPS = f"{_P}batch_step_seconds"
_ALL = 'step="triggerExecution"'

ROWS: dict[str, list[Panel]] = {
    "Lag": [
        Panel(
            "Rows behind",
            "short",
            "Rows between the end of the last micro-batch and the end of the stream.",
            {"{{query}} {{stream}}": f"{_P}offsets_behind_latest{{Q}}"},
        ),
        Panel(
            "Seconds behind",
            "s",
            "Time between the messages at these two ends.",
            {"{{query}} {{stream}}": f"{_P}seconds_behind_latest{{Q}}"},
        ),
        Panel(
            "Since the last report",
            "s",
            "A query reports every micro-batch, and every 10 s when it is idle.",
            {"{{query}}": f"time() - {_P}last_report_timestamp_seconds{{Q}}"},
        ),
    ],
    "Micro-batches": [
        Panel("Rows read", "rps", "", {"{{query}}": _rate("input_rows")}),
        Panel("Bytes read", "Bps", "", {"{{query}} {{stream}}": _rate("input_bytes", "stream")}),
        Panel(
            "Duration of a micro-batch",
            "s",
            "",
            {
                "{{query}} p50": _quantile(0.5, "batch_step_seconds", where=_ALL),
                "{{query}} p99": _quantile(0.99, "batch_step_seconds", where=_ALL),
            },
        ),
        Panel(
            "Duration of its steps",
            "s",
            "Mean by Spark's names; addBatch reads and merges.",
            {
                "{{query}} {{step}}": (
                    f"sum by (query, step) (rate({_STEPS}_sum{{Q}}[$__rate_interval]))"
                    f" / sum by (query, step) (rate({_STEPS}_count{{Q}}[$__rate_interval]) > 0)"
                )
            },
        ),
    ],
    "Table": [
        Panel(
            "Freshness",
            "s",
            "From the put of the newest entry of a merge to its commit.",
            {
                "{{table}} p50": _quantile(0.5, "freshness_seconds", "table"),
                "{{table}} p99": _quantile(0.99, "freshness_seconds", "table"),
            },
        ),
        Panel(
            "Age of the newest row",
            "s",
            "Grows also where the bucket has no new entries.",
            {"{{table}}": f"time() - {_P}newest_row_timestamp_seconds{{Q}}"},
        ),
        Panel(
            "Rows changed",
            "rps",
            "",
            {"{{table}} {{change}}": _rate("merged_rows", "table", "change")},
        ),
        Panel(
            "Bytes written ÷ changed",
            "none",
            "How much merges and compactions write for each byte that changes.",
            {
                "{{table}}": (
                    f"{_rate('written_bytes', 'table')} / ({_rate('changed_bytes', 'table')} > 0)"
                )
            },
        ),
        Panel("Data files", "short", "", {"{{table}}": f"{_P}table_files{{Q}}"}),
        Panel("Compactions", "ops", "", {"{{table}}": _rate("compactions", "table")}),
        Panel(
            "Index of keys",
            "bytes",
            "Memory in the driver.",
            {"{{table}}": f"{_P}index_bytes{{Q}}"},
        ),
    ],
    "Faults": [
        Panel(
            "Consumer rebuilds",
            "ops",
            "Ordered consumers that were lost, by reason. No message is lost with them.",
            {
                "{{query}} {{stream}} {{reason}}": _or_zero(
                    _rate("consumer_rebuilds", "stream", "reason")
                )
            },
        ),
        Panel(
            "Retries while unavailable",
            "ops",
            "",
            {"{{query}} {{process}}": _rate("retries", "process")},
        ),
        Panel(
            "Time in outages",
            "percentunit",
            "",
            {"{{query}} {{process}}": _rate("outage_seconds", "process")},
        ),
        Panel(
            "Data losses accepted",
            "short",
            "With failOnDataLoss=false.",
            {
                "{{query}} {{stream}}": _or_zero(
                    f"sum by (query, stream) ({_P}data_losses_accepted_total{{Q}})"
                )
            },
        ),
        Panel(
            "Rows written to NATS",
            "rps",
            "Of queries with a nats_kv or nats_stream sink.",
            {
                "{{query}} acknowledged": _or_zero(_rate("sink_pub_acks")),
                "{{query}} conflicts": _or_zero(_rate("sink_conflicts")),
            },
        ),
    ],
}


def dashboard() -> str:
    """The dashboard's JSON."""
    built = (
        Dashboard("nats-stream-source")
        .uid("nats-stream-source")
        .tags(["nats", "spark"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(DatasourceVariable("datasource").type("prometheus"))
        .with_variable(
            QueryVariable("query")
            .datasource(DATASOURCE)
            .query(f"label_values({_P}query_active, query)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
        )
    )
    for title, panels in ROWS.items():
        built = built.with_row(Row(title))
        for panel in panels:
            built = built.with_panel(_built(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


def _built(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True)
    legend = legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    made = timeseries.Panel().title(panel.title).unit(panel.unit).datasource(DATASOURCE)
    made = made.description(panel.description).legend(legend).min(0).span(8).height(8)
    for number, (legend_format, expression) in enumerate(panel.queries.items()):
        query = (
            Dataquery().expr(expression.replace("{Q", "{" + _QUERY)).legend_format(legend_format)
        )
        made = made.with_target(query.ref_id(chr(ord("A") + number)))
    return made


if __name__ == "__main__":
    print(dashboard(), end="")
