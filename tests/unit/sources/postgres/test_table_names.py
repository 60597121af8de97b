"""Names of tables as SQL writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.errors import ConfigError
from evermark.sources.postgres.names import TableName, TableNameError, table_name
from evermark.sources.postgres.target import TableChoice

NAMES = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=' "'), min_size=1, max_size=15).filter(
    str.isprintable
)


@pytest.mark.parametrize(
    ("text", "schema", "table", "written"),
    [
        ("orders", "public", "orders", "public.orders"),
        ("shop.order_items$2", "shop", "order_items$2", "shop.order_items$2"),
        ('"Orders"', "public", "Orders", 'public."Orders"'),
        ('public."Orders"', "public", "Orders", 'public."Orders"'),
        ('"My Shop"."it\'s 50% off"', "My Shop", "it's 50% off", '"My Shop"."it\'s 50% off"'),
        ('a."b.c"', "a", "b.c", 'a."b.c"'),
        ('"a.b".c', "a.b", "c", '"a.b".c'),
        ('public."say ""hi"""', "public", 'say "hi"', 'public."say ""hi"""'),
        ('"public"."orders"', "public", "orders", "public.orders"),
        ("public.größe", "public", "größe", "public.größe"),
    ],
)
def test_a_name_is_read_as_sql_reads_it(text: str, schema: str, table: str, written: str) -> None:
    """GIVEN a name as SQL writes it THEN schema and table are the catalog's, and it can be written back."""
    found = table_name(text)
    assert found == TableName(schema, table)
    assert found.sql == written
    assert found.stream == f"{schema}.{table}"


@pytest.mark.parametrize(
    ("text", "why", "hint"),
    [
        ("public.Orders", "capitals without quotes", 'public."Orders" is the table with capitals, public.orders the'),
        ("Shop.orders", "capitals without quotes", '"Shop".orders is the table with capitals, shop.orders the'),
        ("public.order items", "needs double quotes", 'write public."order items"'),
        ("public.it's", "needs double quotes", 'write public."it\'s"'),
        ("public.2nd", "needs double quotes", 'write public."2nd"'),
        ("a.b.c", "expected a table", ""),
        ("a.", "expected a table", ""),
        (".a", "expected a table", ""),
        ("", "expected a table", ""),
        ('public."Orders', "expected a table", ""),
        ('public.""', "expected a table", ""),
        ('public."a"b', "expected a table", ""),
        ('public."a\nb"', "control characters", ""),
        ("public." + "a" * 64, "at most 63 bytes", ""),
        ('public."' + "ä" * 32 + '"', "at most 63 bytes", ""),
    ],
)
def test_a_name_that_means_something_else_is_refused_with_what_to_write(text: str, why: str, hint: str) -> None:
    """GIVEN what SQL would read otherwise, or not at all THEN it is refused, and the right way is shown."""
    with pytest.raises(TableNameError, match=why) as refused:
        table_name(text)
    assert hint in refused.value.hint
    with pytest.raises(ConfigError, match=why):
        TableChoice(text)


@given(NAMES, NAMES)
def test_every_name_comes_back_from_how_it_is_written(schema: str, table: str) -> None:
    """GIVEN any table WHEN written as SQL and read again THEN it is that table."""
    name = TableName(schema, table)
    assert table_name(name.sql) == name
