"""Metrics of several engines on one page."""

from prometheus_client.parser import text_string_to_metric_families

from qserve.server.observability.metrics_pages import join_pages

PAGE = """# HELP q:running Outputs.
# TYPE q:running gauge
q:running{model_name="a {b} c"} 1.0
# HELP process_x CPU.
# TYPE process_x counter
process_x 2.5
"""


def test_metrics_of_servers_are_merged_with_a_label():
    assert join_pages({"7/m": PAGE, "8/m": PAGE}, "replica") == (
        "# HELP q:running Outputs.\n# TYPE q:running gauge\n"
        'q:running{replica="7/m",model_name="a {b} c"} 1.0\n'
        'q:running{replica="8/m",model_name="a {b} c"} 1.0\n'
        "# HELP process_x CPU.\n# TYPE process_x counter\n"
        'process_x{replica="7/m"} 2.5\n'
        'process_x{replica="8/m"} 2.5\n'
    )
    assert join_pages({}, "replica") == ""


def test_merged_page_parses_in_prometheus():
    families = list(
        text_string_to_metric_families(join_pages({"7/m": PAGE, "8/m": PAGE}, "replica"))
    )
    assert [len(each.samples) for each in families] == [2, 2]


def test_metrics_of_the_process_appear_once():
    page = join_pages({"a": PAGE, "b": PAGE}, "model_name", of_one_process=True)
    assert [line for line in page.splitlines() if line.startswith("process_x")] == ["process_x 2.5"]


def test_existing_labels_are_kept():
    page = join_pages({"a": PAGE, 'b"': PAGE}, "model_name")
    assert page.count('q:running{model_name="a {b} c"} 1.0') == 2
    values = [
        sample.labels["model_name"]
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    ]
    assert values == ["a {b} c", "a {b} c", "a", 'b"']
