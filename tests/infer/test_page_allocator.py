"""Page allocator: references, the prefix cache's pages, eviction."""

from __future__ import annotations

from jaxllm.infer.scheduling.page_allocator import PageAllocator, page_hash

ONE, TWO = (page_hash(b"", [n]) for n in (1, 2))


def test_only_a_page_of_its_own_is_written():
    """Pages that others read, or that later requests may find, are copied before they are written to."""
    pages = PageAllocator(4)
    page = pages.allocate()
    assert pages.writable(page)
    pages.share(page)
    assert not pages.writable(page)
    pages.release(page)
    assert pages.writable(page)
    pages.register(page, ONE)
    assert not pages.writable(page), "registered: its contents are what its hash says"
    pages.release(page)
    pages.share(page)
    assert not pages.writable(page)
    pages.clear_cache()
    assert pages.writable(page)


def test_cached_pages_are_found_until_their_memory_is_needed():
    pages = PageAllocator(2)
    first, second = pages.allocate(), pages.allocate()
    pages.register(first, ONE)
    pages.register(second, TWO)
    assert pages.available == 0
    pages.release(second)
    pages.release(first)
    assert pages.available == 2
    assert [pages.find(ONE), pages.find(TWO)] == [first, second]
    assert pages.allocate() == second, "released first"
    assert [pages.find(ONE), pages.find(TWO)] == [first, None]
    pages.share(first)
    assert pages.available == 0
    assert pages.writable(second)


def test_the_first_page_of_a_hash_is_the_one_found():
    pages = PageAllocator(3)
    first, second = pages.allocate(), pages.allocate()
    pages.register(first, ONE)
    pages.register(second, ONE)
    assert pages.find(ONE) == first
    assert pages.writable(second)
    pages.release(second)
    assert pages.allocate() != first


def test_a_hash_is_of_the_tokens_and_all_before_them():
    assert page_hash(ONE, [1, 2]) == page_hash(ONE, [1, 2])
    assert len({page_hash(before, tokens) for before in (b"", ONE, TWO) for tokens in ([1], [2], [1, 2], [2, 1])}) == 12
