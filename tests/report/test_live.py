"""The served report: it answers its own page only, and searches plans with the pins that it is sent."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from urllib.parse import urlsplit

import hidet
import pytest

from hidet_dist.errors import ConfigError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.report.collect import collect
from hidet_dist.report.live import serving
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.weights import weight


@pytest.fixture(scope="module")
def searching():
    x = hidet.symbol([8, 64])
    y = hidet.ops.relu(x @ weight("fc1.weight", [64, 256])) @ weight("fc2.weight", [256, 64])
    graph, cluster = normalize(hidet.trace_from(y, [x])), builtin("cpu", DeviceMesh((2,)))

    def searched(pins, clock=time.perf_counter):
        stage = search(graph, cluster, pins=pins, clock=clock).plan.stages[0]
        return collect(stage, graph, cluster, "served")

    return searched


@pytest.fixture(scope="module")
def address(searching):
    with serving(searching({}), searching) as url:
        yield urlsplit(url)


def ask(address, method="GET", path=None, body=None, **headers):
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    connection.putrequest(method, path or address.path, skip_host="Host" in headers)
    data = None if body is None else body.encode()
    for name, value in headers.items():
        connection.putheader(name, value)
    if data is not None:
        connection.putheader("Content-Length", str(len(data)))
    connection.endheaders(data)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_it_serves_its_page_on_loopback_to_those_who_know_the_token(address):
    assert address.hostname == "127.0.0.1"
    answer, page = ask(address)
    assert answer.status == 200
    assert "<title>served</title>" in page
    assert "connect-src &#x27;self&#x27;" in page or "connect-src 'self'" in page
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    for path in ("/", "/wrong/", address.path + "x", address.path.rstrip("/")):
        assert ask(address, path=path)[0].status == 404


def test_other_hosts_and_pages_are_refused(address):
    assert ask(address, Host="evil.example")[0].status == 404
    assert ask(address, Host=f"evil.example:{address.port}")[0].status == 404
    plan = address.path + "plan"
    assert ask(address, "POST", plan, "{}", Origin="http://evil.example")[0].status == 404
    assert ask(address, "POST", plan, "{}", Origin=f"http://127.0.0.1:{address.port}")[0].status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "same-origin", "none"])
def test_requests_that_a_browser_marks_as_from_elsewhere_are_refused(address, site):
    expected = 404 if "site" in site else 200
    assert ask(address, **{"Sec-Fetch-Site": site})[0].status == expected
    assert ask(address, "POST", address.path + "plan", "{}", **{"Sec-Fetch-Site": site})[0].status == expected


def test_pins_are_searched_with(address):
    answer, text = ask(address, "POST", address.path + "plan", json.dumps({"fc1.weight": "(R, S0)"}))
    assert answer.status == 200
    packed = json.loads(text)["report"]
    assert packed["type"] == "Report"
    assert "(R, S0)" in packed["texts"]


@pytest.mark.parametrize("body", ["", "[1]", '{"fc1.weight": 1}', "{" * 10000, "[" * 200_000, "NaN"])
def test_malformed_pins_are_refused(address, body):
    assert ask(address, "POST", address.path + "plan", body)[0].status == 400


def test_pins_that_cannot_be_met_are_answered_with_the_reason(address, searching):
    wrong = {"fc1.weight": "(S7, R)"}
    with pytest.raises(ConfigError) as error:
        searching(wrong)
    answer, text = ask(address, "POST", address.path + "plan", json.dumps(wrong))
    assert answer.status == 422
    assert json.loads(text)["error"] == str(error.value)


class Endless:
    """A search that ends only when its clock says that nobody waits for it."""

    def __init__(self):
        self.began, self.ended = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, pins, clock):
        self.began.release()
        while clock() != math.inf:
            time.sleep(0.01)
        self.ended.release()
        raise ConfigError("Out of time.")


def post(url):
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    connection.request("POST", url.path + "plan", "{}")
    return connection


def test_searches_end_once_their_client_has_gone(searching):
    endless = Endless()
    with serving(searching({}), endless) as address:
        first, second = (post(urlsplit(address)) for _ in range(2))
        assert endless.began.acquire(timeout=60)
        second.close()  # whichever of the two waits for its turn
        first.close()
        assert endless.ended.acquire(timeout=60)


def test_the_server_ends_after_its_search(searching):
    endless = Endless()
    with serving(searching({}), endless) as address:
        waiting = post(urlsplit(address))
        assert endless.began.acquire(timeout=60)
    assert endless.ended.acquire(blocking=False)
    waiting.close()
