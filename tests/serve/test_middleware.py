"""Access control: API keys, allowed hosts and CORS origins."""

import pytest

from served import ask, chat_pair, error_of, serving
from specedge.serve.app import ServerSettings


@pytest.fixture(scope="module")
def pair():
    return chat_pair(1)


def test_api_key_is_required_except_for_health(pair):
    with serving(pair, api_key="geheim") as port:
        assert ask(port, "GET", "/health")[0] == 200
        for path in ("/v1/models", "/metrics", "/nothing"):
            for sent in ({}, {"Authorization": "Bearer falsch"}, {"Authorization": "geheim"}):
                status, _, said = ask(port, "GET", path, **sent)
                assert (status, error_of(said)["code"]) == (401, "invalid_api_key")
        assert ask(port, "GET", "/v1/models", Authorization="Bearer geheim")[0] == 200


def test_cors_allows_only_configured_origins(pair):
    with serving(pair, origins=("https://good.example",), api_key="k") as port:

        def allowed(origin):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            return ask(port, "OPTIONS", "/v1/completions", **asked)[1].get(
                "access-control-allow-origin"
            )

        assert allowed("https://good.example") == "https://good.example"
        assert allowed("https://evil.example") is None


@pytest.mark.parametrize(
    ("path", "host", "origin", "code"),
    [
        ("/v1/models", "localhost", None, None),
        ("/v1/models", "LOCALHOST:8000", "http://localhost:8000", None),
        ("/v1/models", "127.0.0.1:80", None, None),
        ("/v1/models", "[::1]:9", "http://[::1]:9", None),
        ("/v1/models", "127.0.0.1:80", "https://pages.example", None),
        ("/v1/models", "pair.example", "https://pair.example", None),
        ("/v1/models", "127.0.0.1:80", "https://pair.example", None),
        ("/v1/models", "evil.example:8000", None, "host_not_allowed"),
        ("/v1/models", "evil.example:8000", "http://evil.example:8000", "host_not_allowed"),
        ("/", "evil.example", None, "host_not_allowed"),
        ("/health", "localhost.evil.example", None, "host_not_allowed"),
        ("/v1/models", "[::1", None, "host_not_allowed"),
        ("/v1/models", "localhost:8000", "https://evil.example", "origin_not_allowed"),
        ("/v1/models", "localhost:8000", "http://localhost:3000", None),
        ("/v1/models", "localhost:8000", "app://obsidian.md", None),
        ("/v1/models", "localhost:8000", "vscode-webview://a1", None),
        ("/v1/models", "localhost:8000", "null", "origin_not_allowed"),
    ],
)
def test_foreign_host_and_origin_are_rejected(named, path, host, origin, code):
    given = {"Host": host} | ({"Origin": origin} if origin else {})
    status, _, said = ask(named, "GET", path, **given)
    assert (status, code and error_of(said)["code"]) == (403 if code else 200, code)


@pytest.fixture(scope="module")
def named(pair):
    hosts, origins = ("localhost", "127.0.0.1", "::1", "pair.example"), ("https://pages.example",)
    with serving(pair, hosts=hosts, origins=origins) as found:
        yield found


def test_api_key_permits_any_host_and_origin(pair):
    with serving(pair, api_key="k") as port:
        given = {"Host": "here", "Origin": "https://there", "Authorization": "Bearer k"}
        assert ask(port, "GET", "/v1/models", **given)[0] == 200


def test_app_without_key_or_hosts_serves_only_localhost(pair):
    with serving(pair) as port:
        statuses = [
            ask(port, "GET", "/v1/models", Host=host, Origin=f"http://{host}")[0]
            for host in ("localhost:49153", "evil.example:49153")
        ]
    assert statuses == [200, 403]


@pytest.mark.parametrize("host", ["pair.example", "PAIR.example", "10.0.0.7", "::1", "fe80::1"])
def test_valid_allowed_host_is_accepted(host):
    assert ServerSettings(hosts=(host,)).hosts == (host,)


@pytest.mark.parametrize(
    "host", ["pair.example:8000", "http://pair.example", "pair.example/", "[::1]", "*", ""]
)
def test_invalid_allowed_host_is_rejected(host):
    with pytest.raises(ValueError, match="an allowed host is a name or an address without scheme"):
        ServerSettings(hosts=(host,))
