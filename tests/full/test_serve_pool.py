"""More asked at once than the pool can hold: nobody fails, nobody waits for ever."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from helpers.servers import RAIN, said, serving

GRAPH = "autoregressive"


def test_many_choices_wait_for_room_in_a_small_pool(tmp_path: Path) -> None:
    small = (
        "--set",
        "layout.kv_slots=160",
        "--set",
        "limits.max_new_tokens=64",
        "--max-queue",
        "32",
    )
    with serving(tmp_path, GRAPH, *small) as server:
        body: dict[str, Any] = {"messages": said(RAIN), "max_tokens": 12, "ignore_eos": True}

        def ask(number: int) -> Any:
            own = {**body, "n": 8, "temperature": 1.0, "seed": 100 * number}
            return server.http.post("/v1/chat/completions", json=own)

        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(ask, range(8)))
        statuses = [one.status_code for one in got]
        assert set(statuses) == {200, 503} and statuses.count(200) >= 4
        for one in got:
            if one.status_code == 200:
                assert one.json()["usage"]["completion_tokens"] == 8 * 12
        server.until(lambda: server.metric("specsot:kv_slots_used") == 0)
        assert server.metric("specsot:requests_open") == 0
        never = server.chat(model=GRAPH, max_tokens=400)
        assert never.json()["error"]["code"] == "context_length_exceeded"
