"""The search for the largest number of rows that fits. It needs few trials, because memory is almost linear in the rows. Pure."""

from __future__ import annotations

from collections.abc import Callable

MOST = 2**20
_MOST_TRIALS = 12


def largest(peak: Callable[[int], int], first: int, room: int) -> tuple[int | None, int]:
    """The largest number of rows, up to `MOST`, with `peak(rows)` at most `room`, and its peak. If one row does not fit: 0, and a peak that
    is too large. If memory fits and does not grow with the rows: None."""
    peaks = {first: peak(first)}
    slope = 0.0
    for factor in (2, 1024):  # with few rows, other memory may determine the peak
        second = max(1, first * factor if peaks[first] <= room else first // factor)
        if slope <= 0 and second != first:
            peaks[second] = peak(second)
            slope = (peaks[second] - peaks[first]) / (second - first)
    if slope <= 0:
        return (None, peaks[first]) if peaks[first] <= room else (0, peaks[first])
    for _ in range(_MOST_TRIALS):
        low = max((rows for rows, count in peaks.items() if count <= room), default=0)
        high = min((rows for rows, count in peaks.items() if count > room), default=MOST + 1)
        if high - low == 1:
            break
        if not low:
            guess = high // 2
        elif high > MOST:
            guess = low + int((room - peaks[low]) // slope)
        else:  # memory is the maximum of several lines, so it is not above the line between the two points
            guess = low + int((room - peaks[low]) * (high - low) // (peaks[high] - peaks[low]))
        rows = min(max(guess, low + 1), high - 1)
        peaks[rows] = peak(rows)
    return low, peaks[low or min(peaks)]
