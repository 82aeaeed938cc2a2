"""The emulated device: products follow each other, and only waits for messages leave it idle."""

import time

import pytest

from brigata.measure.emulated import Device


def seconds_of(device: Device, *products: float) -> float:
    start = time.perf_counter()
    for product in products:
        device.compute(product)
    return time.perf_counter() - start


def test_products_follow_each_other_without_gaps() -> None:
    elapsed = seconds_of(Device(lambda: 0.0), *[0.002] * 50)
    assert 0.1 <= elapsed < 0.13  # 50 timed waits that each woke up late would add up


def test_host_work_between_products_does_not_delay_the_device() -> None:
    device = Device(lambda: 0.0)
    start = time.perf_counter()
    device.compute(0.02)
    time.sleep(0.01)  # the host is busy; nothing was waited for
    device.compute(0.02)
    assert time.perf_counter() - start == pytest.approx(0.04, abs=0.008)


def test_a_wait_for_a_message_leaves_the_device_idle() -> None:
    waited = 0.0
    device = Device(lambda: waited)
    start = time.perf_counter()
    device.compute(0.02)
    time.sleep(0.03)
    waited += 0.03
    device.compute(0.02)
    assert time.perf_counter() - start >= 0.07
