/* SPDX-License-Identifier: MIT */
/* The addresses around all of a kind that ever were. Most words that might be one of them lie elsewhere. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct mpsd_span {
	_Atomic(uint64_t) lowest, end;
};

#define MPSD_NO_SPAN { UINT64_MAX, 0 }

/* Read once for many words: nobody has an address yet of what comes meanwhile. */
struct mpsd_bounds {
	uint64_t lowest, size;
};

static inline struct mpsd_bounds mpsd_span_bounds(const struct mpsd_span *span)
{
	uint64_t lowest = atomic_load_explicit(&span->lowest, memory_order_relaxed);
	uint64_t end = atomic_load_explicit(&span->end, memory_order_relaxed);

	return (struct mpsd_bounds){ lowest, end > lowest ? end - lowest : 0 };
}

/* False is certain. No lock, and next to no time. */
static inline bool mpsd_bounds_may_hold(struct mpsd_bounds bounds, uint64_t address)
{
	return address - bounds.lowest < bounds.size;
}

static inline bool mpsd_span_may_hold(const struct mpsd_span *span, uint64_t address)
{
	return mpsd_bounds_may_hold(mpsd_span_bounds(span), address);
}

static inline void mpsd_span_widen(struct mpsd_span *span, uint64_t base, uint64_t size)
{
	uint64_t lowest = atomic_load(&span->lowest), end = atomic_load(&span->end);

	while (base < lowest && !atomic_compare_exchange_weak(&span->lowest, &lowest, base))
		;
	while (base + size > end && !atomic_compare_exchange_weak(&span->end, &end, base + size))
		;
}
