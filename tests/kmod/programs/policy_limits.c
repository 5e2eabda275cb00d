// SPDX-License-Identifier: MIT
/*
 * Counters at their limits, which take too many faults to reach one by one. Exits with the line that fails.
 */
#include "mpsd-policy.h"

#define CHECK(law) \
	do { \
		if (!(law)) \
			return __LINE__ & 0xff ? __LINE__ & 0xff : 1; \
	} while (0)

static const struct mpsd_policy_params params = {
	.mode = MPSD_MODE_ISOLATE, .deadline_ms = 2000, .max_sinks = 0xffffffffU,
};
static const struct mpsd_fault fault = {
	.address = 0x200000, .fault_type = MPSD_FAULT_INVALID_PTE, .access = MPSD_ACCESS_READ,
	.uvm_reason = MPSD_REASON_INVALID_ADDRESS, .engine = MPSD_ENGINE_GRAPHICS,
	.client_type = MPSD_CLIENT_GPC, .fatal = true, .replayable = true,
};
static const struct mpsd_around around = {
	.free_last = ~0ULL, .range = MPSD_RANGE_FREE, .can_address = true,
};

static int sinks_end_at_the_limit(void)
{
	struct mpsd_space space = { .sinks = MPSD_MAX_SINKS_LIMIT - 1, .faults = 0xfffffffeU };
	struct mpsd_decision decision;
	struct mpsd_sink sink;

	mpsd_policy_decide(&params, &space, &fault, &around, &decision);
	CHECK(decision.action == MPSD_ACTION_SUNK && decision.bytes == MPSD_MAX_SINK_BYTES);
	mpsd_policy_sunk(&params, &space, &fault, &decision, &sink, 1);
	CHECK(space.sinks == MPSD_MAX_SINKS_LIMIT && decision.report);
	mpsd_policy_decide(&params, &space, &fault, &around, &decision);
	CHECK(decision.action == MPSD_ACTION_REFUSED && decision.why == MPSD_WHY_TOO_MANY);
	CHECK(space.faults == 0xffffffffU);
	return 0;
}

static int a_counter_that_is_full_stays_and_tells_nothing(void)
{
	struct mpsd_space space = { .released = true };
	struct mpsd_decision decision;
	__u32 *seen = &space.seen[1][MPSD_WHY_RELEASED];

	*seen = 0xfffffffeU;
	mpsd_policy_decide(&params, &space, &fault, &around, &decision);
	CHECK(*seen == 0xffffffffU && !decision.report);
	mpsd_policy_decide(&params, &space, &fault, &around, &decision);
	CHECK(*seen == 0xffffffffU && !decision.report && decision.why == MPSD_WHY_RELEASED);
	return 0;
}

/* Years of uptime: sums with the time must not wrap. */
static int late_times(void)
{
	struct mpsd_space space = { .sinks = 0 };
	struct mpsd_decision decision;
	struct mpsd_sink sink;
	__u64 now_ns = 1ULL << 62;

	mpsd_policy_decide(&params, &space, &fault, &around, &decision);
	mpsd_policy_sunk(&params, &space, &fault, &decision, &sink, now_ns);
	CHECK(space.deadline_ns == now_ns + 2000000000ULL);
	CHECK(mpsd_policy_acknowledge(&params, &space) == MPSD_ANSWER_OK);
	CHECK(space.deadline_ns == now_ns + 20000000000ULL);
	return 0;
}

int main(void)
{
	int line = sinks_end_at_the_limit();

	if (!line)
		line = a_counter_that_is_full_stays_and_tells_nothing();
	return line ? line : late_times();
}
