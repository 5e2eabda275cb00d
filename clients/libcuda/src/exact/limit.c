// SPDX-License-Identifier: MIT
#include "exact/limit.h"

#include <stdatomic.h>
#include <unistd.h>

#include "clock.h"
#include "exact/budget.h"
#include "exact/leave.h"
#include "exact/state.h"
#include "failover/carry.h"
#include "failover/line.h"

#define ASK_NS 1000000000ull	/* between two requests that the daemon cannot meet */
#define ANSWER_NS 100000000ull	/* then the program goes on without */
#define LOOK_US 30

static atomic_uint_least64_t limit = MPSD_NO_LIMIT, wanted, asked_ns;
static atomic_uint_least64_t awaited_until_ns;	/* for one answer, all waits together */
static atomic_bool has_daemon;
static atomic_bool is_refused;	/* the daemon has answered that it cannot meet a request, and the limit is still the same */
static atomic_uint refusals;	/* such answers */

/* With the lock */
static struct mpsd_misses misses;
static struct mpsd_leaving leaving;	/* as of the last miss */
static bool is_leaving;			/* at the end of an epoch: the program misses too often */
static unsigned int counted;		/* of the refusals: each makes one miss at most */

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
	if (!before)
		atomic_store(&awaited_until_ns, now + ANSWER_NS);
	atomic_store(&asked_ns, now);
	atomic_store(&wanted, bytes);
	mpsd_line_wake();
}

CUresult mpsd_limit_await(void)
{
	uint64_t moves = mpsd_tables()->moves;

	while (atomic_load(&wanted) && atomic_load(&has_daemon) && mpsd_now_ns() < atomic_load(&awaited_until_ns)) {
		if (atomic_load(&mpsd_moves) != moves)
			return MPSD_AGAIN;
		usleep(LOOK_US);
	}
	return CUDA_SUCCESS;
}

void mpsd_limit_answers(bool is)
{
	atomic_store(&has_daemon, is);
}

/* With the lock. The limit may have been raised since the last miss. */
static void forget_what_fits_now(uint64_t has)
{
	if (leaving.values[0] > has)
		return;
	misses = (struct mpsd_misses){ 0 };
	is_leaving = false;
}

bool mpsd_limit_missed(uint64_t needs, bool may_come_back)
{
	bool refused = atomic_load(&is_refused);
	unsigned int answers = atomic_load(&refusals);
	uint64_t has = atomic_load(&limit);

	mpsd_limit_want(needs);
	if (!refused)
		return true;
	mpsd_word_take(&mpsd_exact_lock);
	forget_what_fits_now(has);
	/* Epochs are short, so one refusal meets many of them. */
	if (counted != answers) {
		counted = answers;
		is_leaving = mpsd_budget_miss(&misses, mpsd_now_ns());
		leaving = (struct mpsd_leaving){
			.budget = MPSD_FAILOVER_BUDGET_MEMORY,
			.values = { needs, has },
			.may_come_back = may_come_back,
		};
	}
	mpsd_word_give(&mpsd_exact_lock);
	return false;
}

void mpsd_limit_end(void)
{
	forget_what_fits_now(atomic_load(&limit));
	if (is_leaving)
		mpsd_leave(&leaving);
}

void mpsd_limit_told(uint64_t bytes, uint64_t wish)
{
	uint64_t request = atomic_load(&wanted), before = atomic_exchange(&limit, bytes);
	bool is_answer = request && wish == request;

	if (is_answer && request > bytes) {
		atomic_store(&is_refused, true);
		atomic_fetch_add(&refusals, 1);
	} else if (is_answer || bytes != before) {
		atomic_store(&is_refused, false);
	}
	/* Not a larger one that the program has made meanwhile. */
	if (is_answer || request <= bytes)
		atomic_compare_exchange_strong(&wanted, &request, 0);
	mpsd_release_begin();
}

uint64_t mpsd_limit_wanted(void)
{
	uint64_t bytes = atomic_load(&wanted);

	return bytes > atomic_load(&limit) ? bytes : 0;
}
