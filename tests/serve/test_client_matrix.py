"""The table of tested clients in docs/clients.md has the sessions of tools/clients."""

import matrix


def rows():
    text = matrix.PAGE.read_text("utf-8").partition(matrix.BEGIN)[2].partition(matrix.END)[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines()[4:]]


def test_each_session_is_in_the_table_with_its_packages():
    expected = [(client.name, client.versions) for client in matrix.CLIENTS]
    assert sorted((name, versions) for name, versions, _, _ in rows()) == sorted(expected)


def test_a_run_of_one_client_keeps_the_lines_of_the_others(tmp_path, monkeypatch):
    page = tmp_path / "clients.md"
    page.write_text(matrix.PAGE.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(matrix, "PAGE", page)
    before = rows()
    client = matrix.CLIENTS[0]
    steps = [{"step": "one", "error": None}, {"step": "two", "error": "it broke"}]
    matrix.write_rows({client.name: matrix.row(client, steps)})
    after = rows()
    assert [row for row in after if row[0] != client.name] == [
        row for row in before if row[0] != client.name
    ]
    assert [client.name, client.versions, "one", "two"] in after
