"""Templates that grow without end get a short answer, in bounded time and memory; honest ones render as Jinja2 renders them."""

from __future__ import annotations

import datetime
import resource
import time

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchllm.data import template_budget
from batchllm.data.templates import compile_chat_template, compile_template

SET = "{% set ns = namespace(s='xy', l=[1]) %}"
GROWING = {
    "round": "{{ 'x' | length | round(100000000, 'ceil') }}",
    "is eq": "{% set a = namespace(l=[1]) %}{% set b = namespace(l=[1]) %}{% for i in range(60) %}"
    "{% set a.l = [a.l, a.l] %}{% set b.l = [b.l, b.l] %}{% endfor %}{{ a.l is eq(b.l) }}",
    "wordwrap of one word": "{{ ('a' * 10000000) | wordwrap(1) | length }}",
    "numbers of many digits": "{% set n = ('f' * 8000000) | int(0, 16) %}{{ n // 3 }}",
    "+": SET + "{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s | length }}",
    "~": SET + "{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}",
    "*": SET + "{% for i in range(100) %}{% set ns.s = ns.s * 3 %}{% endfor %}",
    "* of a constant": "{{ 'x' * 10 ** 10 }}",
    "* of numbers": "{% set ns = namespace(n=7) %}{% for i in range(100) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "join": SET + "{% for i in range(100) %}{% set ns.s = [ns.s, ns.s] | join(ns.s) %}{% endfor %}",
    "join of what is made on the way": SET
    + "{% set ns.s = 'x' * 9000000 %}{{ ([ns] * 1000) | map(attribute='s') | join | length }}",
    "method join": SET + "{% for i in range(100) %}{% set ns.s = ns.s.join([ns.s, ns.s]) %}{% endfor %}",
    "method join of what is made on the way": SET
    + "{% set ns.s = 'x' * 9000000 %}{{ ','.join(([ns] * 1000) | map(attribute='s')) | length }}",
    "replace": SET + "{% for i in range(100) %}{% set ns.s = ns.s | replace('x', ns.s) %}{% endfor %}",
    "replace at once": "{% set s = 'x' * 9000000 %}{{ s.replace('', s) | length }}",
    "format": SET + "{% for i in range(100) %}{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}",
    "format of wide fields": "{{ ('{:>9999999}' * 1000).format(*range(1000)) | length }}",
    "format of a given width": "{{ '{:>{}}'.format('x', 10 ** 10) }}",
    "%": SET + "{% for i in range(100) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "% of a wide field": "{{ '%09999999999d' % 3 }}",
    "% of a name and flags": "{{ ('%(a)-----9999999s' * 100) % {'a': 'x'} }}",
    "filter format": SET + "{% for i in range(100) %}{% set ns.s = '%s%s' | format(ns.s, ns.s) %}{% endfor %}",
    "center": "{{ 'x' | center(10 ** 10) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "indent": "{{ ('x\n' * 1000000) | indent(1000000) | length }}",
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(1000000) | length }}",
    "translate": "{{ ('x' * 1000000).translate({120: 'y' * 1000000}) | length }}",
    "tojson": "{{ [1, 2, [3]] | tojson(indent=10 ** 9) }}",
    "list growth": SET + "{% for i in range(100) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l | length }}",
    "lists in lists": SET + "{% for i in range(100) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "lists in lists, as JSON": SET
    + "{% for i in range(100) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    "lists in lists, compared": SET
    + "{% set two = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = [ns.l, ns.l] %}"
    + "{% set two.l = [two.l, two.l] %}{% endfor %}{{ ns.l == two.l }}",
    "slices kept": SET
    + "{% set big = [1] * 1000000 %}{% for i in range(100000) %}{% set ns.l = [ns.l, big[:]] %}{% endfor %}",
    "items of a text": "{{ ('x' * 40000000) | list | length }}",
    "pieces of a text": "{{ ('x ' * 20000000).split() | length }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "sum of lists": "{{ ([[1, 2]] * 1000000) | sum(start=[]) | length }}",
    "bytes of a number": "{{ (5).to_bytes(10 ** 10, 'big') | length }}",
    "lipsum": "{{ lipsum(10 ** 9) }}",
    "output in a loop": "{% set s = 'x' * 100000 %}{% for i in range(100000) %}{{ s }}{% endfor %}",
    "output of a macro": "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}"
    + SET
    + "{% for i in range(100) %}{% set ns.s = m(ns.s) %}{% endfor %}",
    "block set": SET
    + "{% for i in range(100) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}",
    "empty loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops over one range": "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "a width from another argument": "{{ '{:{w}}'.format('x', w='3000000000') }}",
    "a precision from another argument": "{{ '{:.{p}f}'.format(1.5, p='3000000000') }}",
    "a width from another argument of %": "{{ '%.*f' % (900000000, 1.5) }}",
    "a width from another argument of the filter": "{{ '%*d' | format(900000000, 1) }}",
    "format_map with a width of its own": "{{ '{a:{b}}'.format_map({'a': 'x', 'b': 900000000}) }}",
    "a format of many braces": "{{ ('{' * 45000000).format(1) }}",
    "a format of many fields": "{{ ('{}' * 20000000).format(1) }}",
    "a format of many signs": "{{ ('%' * 45000000) % 1 }}",
    "a number as bits": "{{ ('{0:b}' * 20000).format(2 ** 49000) }}",
    "a value as Python writes it": "{{ ('{0!a}' * 90) .format('\U0001f600' * 100000) }}",
    "a date's width": "{% set d = date %}{{ d.strftime('%999999999Y') }}",
    "a date's width in a format": "{{ '{:%999999999Y}'.format(date) }}",
    "count in a long text": "{% set s = 'x' * 40000000 %}{% for i in range(5000) %}{{ s.count('ab') }}{% endfor %}",
    "a long text in a long text": "{% set s = 'a' * 4000000 %}{{ s.rfind('ab' + s) }}",
    "strip of many characters": "{% set s = 'a' * 20000000 %}{{ s.strip('b' * 20000000 + 'a') | length }}",
    "trim of many characters": "{% set s = 'a' * 20000000 %}{{ s | trim('b' * 20000000 + 'a') | length }}",
    "replace of a long text": "{% set s = 'a' * 4000000 %}{{ s | replace('ab' + s, '') | length }}",
    "equal texts in a list": "{% set l = ['x' * 40000000] * 1000000 %}{{ l.count('x' * 40000000) }}",
    "punycode": "{{ ('ü' * 20000000).encode('punycode') | length }}",
    "names of characters": "{{ ('ü' * 20000000).encode('ascii', 'namereplace') | length }}",
    "JSON of what it escapes": "{{ ('\U0001f600' * 12000000) | tojson | length }}",
    "recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "macro that calls itself": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.mark.parametrize("source", GROWING.values(), ids=GROWING)
def test_a_template_that_grows_without_end_is_refused_in_bounded_time_and_memory(source: str) -> None:
    began, before_kb = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((SecurityError, RecursionError, ValueError)) as refused:
        compile_template(source).render(date=datetime.date(2026, 11, 30))
    assert len(str(refused.value).splitlines()) == 1
    assert time.thread_time() - began < 2 * template_budget.MOST_CPU_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 800_000


def test_a_chat_template_is_held_to_the_same() -> None:
    source = "{% set ns = namespace(s='x') %}{% for m in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
    with pytest.raises(SecurityError, match="too many characters"):
        compile_chat_template(source, date=datetime.date(2026, 11, 30)).render(messages=[])


@pytest.mark.parametrize(
    "source",
    [
        "{% set s = 'x' * 1000 %}{% for i in range(100000) %}{% if s.count('y') %}{% endif %}{% endfor %}",
        "{% set l = [1] * 1500000 %}{% for i in range(100000) %}{% set x = l | min %}{% endfor %}",
    ],
    ids=["quick methods", "slow filters"],
)
def test_time_that_no_size_accounts_for_is_over_too(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(template_budget, "MOST_CPU_S", 0.02)
    with pytest.raises(SecurityError, match="takes more than"):
        compile_template(source).render()


def test_compiling_a_template_computes_nothing() -> None:
    """Neither filters nor operators nor methods over constants, in outputs, conditions or assignments: folding them had no bound in sum."""
    long = "('x' | center(40000000))"
    source = "".join(
        f"{{{{ {long} ~ {number} }}}}{{% if {long} %}}{{% endif %}}{{% set a = {long}.upper() %}}"
        for number in range(20)
    )
    began, before_kb = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template = compile_template(source)
    assert time.thread_time() - began < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 30_000
    with pytest.raises(SecurityError, match="too many characters"):
        template.render()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x" * 1_000_001, "it has 1,000,001 characters, at most 1,000,000 are taken"),
        ("{{ a }}" * 30_000, "it has too many expressions"),
        ("{{ " + "+".join("a" * 5000) + " }}", "it is nested too deeply"),
        ("{% include 'other' %}", "there are no others that it could include"),
        ("a\n{{ a | nothing }}", "at its line 2: No filter named 'nothing'"),
        ("{{ '\ud800' }}", "its character 5 is no Unicode text"),
    ],
    ids=["long", "expressions", "depth", "include", "filter", "no Unicode"],
)
def test_a_template_that_cannot_be_one_is_refused_when_it_is_compiled(source: str, says: str) -> None:
    for make in (compile_template, lambda text: compile_chat_template(text, date=datetime.date(2026, 11, 30))):
        with pytest.raises(ValueError, match="not a valid template") as refused:
            make(source)
        assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_chat_templates_clock_is_held_to_the_same() -> None:
    template = compile_chat_template("{{ strftime_now(form) }}", date=datetime.date(2026, 11, 30))
    assert template.render(form="%d %b %Y, %5d") == "30 Nov 2026, 00030"
    with pytest.raises(SecurityError, match="a width in a format is too large"):
        template.render(form="%999999999Y")


def test_each_rendering_has_a_budget_of_its_own() -> None:
    template = compile_template("{{ t + t }}")
    for _ in range(8):
        assert len(template.render(t="x" * 10_000_000)) == 20_000_000


HONEST = [
    "{{ text }}",
    "{{ text + '!' + text ~ n ~ none }}",
    "{{ [1, 2] + items }} {{ items * 2 }} {{ 2 * text }} {{ n * n }} {{ n ** 3 }} {{ n + 1 }}",
    "{% for i in items %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{{ i }}{% else %}none{% endfor %}",
    "{% for i in items if i is odd %}{{ loop.previtem }}{{ i }}{{ loop.nextitem is defined }}{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}",
    "{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is not number else i }}{% endfor %}",
    "{% set ns = namespace(s='') %}{% for i in items %}{% set ns.s = ns.s + text[:2] %}{% endfor %}{{ ns.s }}",
    "{{ items | map('string') | join(', ') }} {{ ','.join(items | map('string')) }} {{ [d] | join('-', attribute='a') }}",
    "{{ text | replace('a', 'bb') }} {{ text.replace('a', '') }} {{ text | indent(4) }} {{ text | center(20) }}",
    "{{ '%s-%05d' % (text, n) }} {{ '%(a)s' % d }} {{ '{0} {1:>8}'.format(text, n) }} {{ '%s!' | format(text) }}",
    "{{ text.split() }} {{ text.split('a', 1) }} {{ text | list | first }} {{ text.splitlines() }} {{ text | wordcount }}",
    "{{ '50%% of %-5s|%.2f|%x' % (text, 1.5, n) }} {{ '{0!r:>9}|{1:,}|{1:08.3f}|{{}}'.format(text, n) }} {{ '%5.1f' | format(n) }}",
    "{{ text.find('a') }} {{ text.strip(' a') }} {{ text | trim('b') }} {{ text.partition('a') }} {{ text.encode('utf-8') | length }}",
    "{{ 'a' ~ 1 }} {{ ['b', 'a'] | sort | join }} {{ 'x' if 1 < 2 else 'y' }} {{ 'abc'[1:] | upper }} {{ none }}",
    "{{ items | sum }} {{ [[1], [2]] | sum(start=[]) }} {{ items | batch(2) | list }} {{ items | sort(reverse=true) }}",
    "{{ d | tojson }} {{ d | tojson(indent=2) }} {{ d | dictsort }} {{ items | select('odd') | list }} {{ d | pprint }}",
    "{{ text == 'ab' }} {{ 1 in items }} {{ items == [1, 2, 3] }} {{ 1 < n < 9 }} {{ {text: n, 'k': [n]} }}",
    "{% macro m(a, b=2) %}[{{ a }}{{ b }}{{ caller() if caller }}]{% endmacro %}{{ m(text) }}{% call m(1) %}c{% endcall %}",
    "{% set t %}{{ text }}{{ text | upper | trim | title }}{% endset %}{{ t }}{{ t | length }}{{ text[::-1] }}",
    "{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}{{ items | max }}",
]


@settings(max_examples=30, deadline=None)
@given(
    text=st.text(st.sampled_from("ab \n%{}é"), max_size=12),
    n=st.integers(0, 99),
    items=st.lists(st.integers(0, 9), max_size=5),
)
def test_honest_templates_render_as_in_jinja2s_own_sandbox(text: str, n: int, items: list[int]) -> None:
    plain = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, extensions=["jinja2.ext.loopcontrols"], auto_reload=False
    )
    values = {"text": text, "n": n, "items": items, "d": {"a": text, "b": [n, items]}}

    def outcome(template: jinja2.Template) -> str:
        try:
            return template.render(values)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"

    for source in HONEST:
        assert outcome(compile_template(source)) == outcome(plain.from_string(source)), source


def test_a_long_text_that_is_no_number_has_the_default() -> None:
    assert compile_template("{{ text | int(7) }}").render(text="word " * 2000) == "7"
