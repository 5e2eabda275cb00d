// SPDX-License-Identifier: MIT
#include "exact/limit.h"

#include <stdatomic.h>

#include "clock.h"
#include "exact/budget.h"
#include "exact/leave.h"
#include "exact/state.h"
#include "failover/line.h"

#define ASK_NS 1000000000ull	/* between two requests that the daemon cannot meet */

static atomic_uint_least64_t limit = MPSD_NO_LIMIT, wanted, asked_ns;
static atomic_bool is_refused;	/* the daemon has answered that it cannot meet a request, and the limit is still the same */

/* With the lock */
static struct mpsd_misses misses;
static struct mpsd_leaving leaving;	/* when the epoch ends, */
static bool is_leaving;			/* for the program misses too often */

uint64_t mpsd_limit(void)
{
	return atomic_load(&limit);
}

void mpsd_limit_want(uint64_t bytes)
{
	uint64_t before = atomic_load(&wanted), now = mpsd_now_ns();

	if (atomic_load(&limit) == MPSD_NO_LIMIT || bytes <= before ||
	    (atomic_load(&is_refused) && now - atomic_load(&asked_ns) < ASK_NS))
		return;
	atomic_store(&asked_ns, now);
	atomic_store(&wanted, bytes);
	mpsd_line_wake();
}

bool mpsd_limit_missed(uint64_t needs, bool may_come_back)
{
	uint64_t has = atomic_load(&limit);
	bool refused = atomic_load(&is_refused);

	mpsd_limit_want(needs);
	if (!refused)
		return true;
	mpsd_word_take(&mpsd_exact_lock);
	is_leaving = mpsd_budget_miss(&misses, mpsd_now_ns());
	leaving = (struct mpsd_leaving){
		.budget = MPSD_FAILOVER_BUDGET_MEMORY,
		.values = { needs, has },
		.may_come_back = may_come_back,
	};
	mpsd_word_give(&mpsd_exact_lock);
	return false;
}

void mpsd_limit_end(void)
{
	if (is_leaving)
		mpsd_leave(&leaving);
}

void mpsd_limit_told(uint64_t bytes)
{
	uint64_t request = atomic_exchange(&wanted, 0), before = atomic_exchange(&limit, bytes);

	if (request > bytes)
		atomic_store(&is_refused, true);
	else if (request || bytes != before)
		atomic_store(&is_refused, false);
	mpsd_release_begin();
}

uint64_t mpsd_limit_wanted(void)
{
	uint64_t bytes = atomic_load(&wanted);

	return bytes > atomic_load(&limit) ? bytes : 0;
}
