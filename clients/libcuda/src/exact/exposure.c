// SPDX-License-Identifier: MIT
#include "exact/exposure.h"

#include <stdatomic.h>
#include <stdint.h>

#include "clock.h"
#include "exact/exact.h"
#include "exact/state.h"
#include "failover/line.h"

#define LASTS_NS 2000000000ull
#define ALWAYS UINT64_MAX

static atomic_uint_least64_t until_ns;
static _Atomic(const char *) reason;

/* Until when it was exposed before. */
static uint64_t last(const char *why, uint64_t now)
{
	uint64_t before = atomic_load(&until_ns), until = now + LASTS_NS;

	atomic_store(&reason, why);
	while (before < until && !atomic_compare_exchange_weak(&until_ns, &before, until))
		;
	return before;
}

void mpsd_exposure_begin(const char *why)
{
	/* The clock is read again: meanwhile the thread of line.c may have found that it is over. */
	if (last(why, mpsd_now_ns()) <= mpsd_now_ns())
		mpsd_line_wake();
}

void mpsd_exposure_stays(const char *why)
{
	atomic_store(&reason, why);
	atomic_store(&until_ns, ALWAYS);
	mpsd_line_wake();
}

const char *mpsd_exposure_why(void)
{
	uint64_t now = mpsd_now_ns();
	const char *why = __atomic_load_n(&mpsd_epoch.unsure, __ATOMIC_RELAXED);

	/* An epoch can last for minutes. */
	if (why && mpsd_exact())
		last(why, now);
	return now < atomic_load(&until_ns) ? atomic_load(&reason) : NULL;
}

int mpsd_exposure_left_ms(void)
{
	uint64_t now = mpsd_now_ns(), until = atomic_load(&until_ns);

	if (until == ALWAYS)
		return -1;
	return now < until ? (int)((until - now) / 1000000) + 1 : 0;
}
