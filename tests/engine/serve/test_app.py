"""The routes without an engine: what fails in a route, and what the description says."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from specsot.engine.errors import UsageError
from specsot.engine.prepare.options import ServeOptions
from specsot.engine.serve.app import Api, build_app
from specsot.engine.serve.metrics import ServerMetrics
from specsot.engine.serve.server import AdmissionMiddleware, cors
from specsot.engine.workers.link import LinkState, ProcessHost, WorkerSource
from specsot.engine.workers.protocol import Start
from specsot.engine.workers.router import Router


@pytest.fixture
def api() -> Api:
    """Of a router that is never run, so its engine is being loaded."""
    start = Start(["dflash"], {})
    router = Router(WorkerSource(lambda number, part: ProcessHost(start)), single=True)
    assert router.state is LinkState.STARTING
    return Api(router, ServerMetrics(router), ServeOptions())


def ask(api: Api, method: str, path: str, **more: Any) -> httpx.Response:
    app = build_app(api)

    async def fail(request: Request) -> Response:
        raise RuntimeError("planted")

    app.add_route("/fails", fail)
    whole: ASGIApp = AdmissionMiddleware(app, api.options, api.server_metrics)
    if api.options.cors:
        whole = cors(whole, api.options.cors)

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(whole)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(get())


def test_an_exception_of_a_route_has_the_shape_of_an_error(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    got = ask(api, "GET", "/fails", headers={"x-request-id": "mine"})
    assert got.status_code == 500 and got.headers["x-request-id"] == "mine"
    error = got.json()["error"]
    assert error["type"] == "server_error" and "mine" in error["message"]
    assert "planted" not in got.text and "request mine: " in capsys.readouterr().err


def test_models_that_are_being_loaded_are_told_from_a_lost_engine(api: Api) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    got = ask(api, "POST", "/v1/chat/completions", json=body)
    assert got.status_code == 503 and got.headers["retry-after"]
    assert got.json()["error"]["code"] == "engine_loading"


def test_the_description_has_path_parameters_and_content_types(api: Api) -> None:
    paths = ask(api, "GET", "/openapi.json").json()["paths"]
    (name,) = paths["/v1/models/{name}"]["get"]["parameters"]
    assert (name["name"], name["in"], name["required"]) == ("name", "path", True)
    metrics = paths["/metrics"]["get"]["responses"]
    assert [*metrics["200"]["content"]] == ["text/plain"]
    assert [*metrics["503"]["content"]] == ["application/json"]


def test_pages_of_named_origins_may_use_the_server(api: Api) -> None:
    api.options = ServeOptions(cors=["https://page.example"], keys=["secret"])
    asked = {"access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization, content-type"
    path = "/v1/chat/completions"
    got = ask(api, "OPTIONS", path, headers={**asked, "origin": "https://page.example"})
    assert got.status_code == 200
    assert got.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in got.headers["access-control-allow-headers"]
    refused = ask(api, "POST", path, json={}, headers={"origin": "https://page.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"]
    other = ask(api, "OPTIONS", path, headers={**asked, "origin": "https://evil.example"})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
    ServeOptions(cors=["*", "http://localhost:3000"]).check()
    with pytest.raises(UsageError, match="--cors page"):
        ServeOptions(cors=["page"]).check()
