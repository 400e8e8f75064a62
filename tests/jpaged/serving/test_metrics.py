"""What the server tells of itself: metrics that agree with what was sent, under the right names, and spans."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from jpaged.serving.protocols.http_errors import CLIENT_GONE, HTTPError, error_summary

from ..tiny_model import SIZES
from .conftest import FLAGS
from .served import Served, serving, wait_until

NAMES = (
    "num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc",
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens",
    "request_success", "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_time_per_output_token_seconds", "request_max_num_generation_tokens",
    "request_params_max_tokens", "request_params_n", "cache_config_info", "iteration_tokens_total", "compile_events",
    "compile_seconds", "swap_bytes", "padding_tokens",
)  # fmt: skip


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Hi", "max_tokens": 5, "ignore_eos": True, **fields}


def families(server: Served) -> dict[str, Any]:
    return {one.name: one for one in text_string_to_metric_families(server.request("/metrics")[2].decode())}


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[int, list[bytes]]]:
    """Give the port of a collector of OTLP traces, and the bodies that it has got."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Stay silent."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, bodies
    server.shutdown()


@pytest.fixture(scope="module")
def traced(tiny: str, collector: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = (*FLAGS, "--vllm-metrics", "--otlp-traces-endpoint", f"http://127.0.0.1:{collector[0]}/v1/traces")
    with serving(tiny, *flags, log=tmp_path_factory.mktemp("traced") / "log") as server:
        yield server


def test_all_names_are_there_with_no_label_of_a_client(served: Served):
    served.request("/v1/completions", body(user="mallory", model="mallory"))
    found = families(served)
    for name in NAMES:
        assert f"jpaged:{name}" in found, name
    labels = {label for family in found.values() for sample in family.samples for label in sample.labels}
    assert labels == {"model_name", "engine", "finished_reason", "le", "block_size", "num_gpu_blocks"}
    values = {value for family in found.values() for sample in family.samples for value in sample.labels.values()}
    assert "mallory" not in values


def test_a_trace_tells_the_kind_of_an_error_and_its_field():
    told = {
        "context_length_exceeded: prompt": HTTPError(400, "a secret", param="prompt", code="context_length_exceeded"),
        "BadRequestError: stop": HTTPError(400, "a secret", param="stop"),
        "ServiceUnavailableError": HTTPError(503, "a secret"),
        "ClientLeftError": HTTPError(CLIENT_GONE, "a secret"),
    }
    assert {words: error_summary(error) for words, error in told.items()} == {words: words for words in told}


def test_the_pool_is_told_as_labels(served: Served):
    (sample,) = families(served)["jpaged:cache_config_info"].samples
    sizes = {"block_size": str(SIZES["block_size"]), "num_gpu_blocks": str(SIZES["num_blocks"] - 1)}
    assert (sample.value, sample.labels) == (1, {"model_name": "tiny", "engine": "0", **sizes})


def test_counts_agree_with_what_was_sent(served: Served):
    before = served.metrics()
    for stream in (True, False):
        for n in (1, 3):
            served.request("/v1/completions", body(stream=stream, n=n, temperature=1.0))
    served.request("/v1/completions", body(max_tokens=0))  # Refused: it is no request of the engine.
    after = served.metrics()

    def change(name: str) -> float:
        return after[f"jpaged:{name}"] - before.get(f"jpaged:{name}", 0)

    assert change("prompt_tokens_total") == 4 * 2
    assert change("generation_tokens_total") == 2 * (1 + 3) * 5
    assert change("e2e_request_latency_seconds_count") == 4
    assert change("time_to_first_token_seconds_count") == 4
    assert change("inter_token_latency_seconds_count") == 2 * (1 + 3) * 4
    assert change("request_generation_tokens_sum") == 40
    assert change("request_max_num_generation_tokens_sum") == change("request_params_max_tokens_sum") == 4 * 5
    assert change("request_params_n_sum") == 2 * (1 + 3)
    queue_s, prefill_s, decode_s, inference_s, token_s, whole_s = (
        change(f"{name}_seconds_sum") for name in (
            "request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time",
            "request_time_per_output_token", "e2e_request_latency",
        )
    )  # fmt: skip
    assert change("request_time_per_output_token_seconds_count") == 4
    assert min(prefill_s, decode_s) > 0
    assert prefill_s + decode_s == pytest.approx(inference_s)
    assert queue_s + inference_s == pytest.approx(whole_s)
    assert token_s == pytest.approx(decode_s / 4)  # Four tokens after the first of each sample.


def test_vllms_names_are_there_on_request(traced: Served):
    traced.request("/v1/completions", body())
    names = families(traced)
    assert all(f"vllm:{name}" in names for name in NAMES)


def test_a_span_is_the_child_of_the_clients_and_holds_counts_and_no_text(tiny: str, collector: Any, log: Path):
    port, bodies = collector
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with serving(tiny, *FLAGS, "--otlp-traces-endpoint", f"http://127.0.0.1:{port}/v1/traces", log=log) as server:
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        server.request("/v1/completions", body(prompt="a secret"), headers=headers)
        server.request("/v1/completions", body(stop=["a secret"] * 17), headers=headers)
    wait_until(lambda: bool(bodies), 5)
    time.sleep(0.1)
    sent = [ExportTraceServiceRequest.FromString(one) for one in bodies]
    spans = [
        span for one in sent for group in one.resource_spans for scope in group.scope_spans for span in scope.spans
    ]
    good, bad = [span for span in spans if span.trace_id.hex() == trace]
    assert good.parent_span_id.hex() == parent
    attributes = {one.key: one.value.int_value or one.value.string_value for one in good.attributes}
    assert attributes["gen_ai.usage.input_tokens"] == len("a secret")
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.request.model"] == "tiny"
    assert (bad.status.code, bad.status.message) == (2, "BadRequestError: stop")
    assert not any(b"secret" in one for one in bodies)
