// SPDX-License-Identifier: MIT
/*
 * policy_fuzz SEED STEPS: garbage in every field and any order of calls. The policy must read and write
 * only what it is given (the sanitizers check) and keep the laws that CHECK names.
 */
#include "mpsd-policy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SINKS 64

#define CHECK(law) \
	do { \
		if (!(law)) \
			broken(#law, __LINE__); \
	} while (0)

static __u64 seed, state, step_number;
static struct mpsd_policy_params params;
static struct mpsd_space *space;
static struct mpsd_sink *sinks[MAX_SINKS];
static __u32 sink_count;
static __u64 now_ns;
static enum mpsd_action last_step;

static void broken(const char *law, int line)
{
	fprintf(stderr, "seed %llu, step %llu, line %d: not so: %s\n", (unsigned long long)seed,
		(unsigned long long)step_number, line, law);
	abort();
}

/* xorshift64*: the same numbers on every machine. */
static __u64 any(void)
{
	state ^= state >> 12;
	state ^= state << 25;
	state ^= state >> 27;
	return state * 0x2545f4914f6cdd1dULL;
}

static __u64 below(__u64 bound)
{
	return any() % bound;
}

/* Addresses crowd around few places, so that ranges meet. */
static __u64 address(void)
{
	static const __u64 places[] = { 0, 0x10000, 0x200000, 0x7f0000000000, 1ULL << 49, ~0ULL - 0x3fffff };
	__u64 place = places[below(sizeof(places) / sizeof(places[0]))];

	switch (below(4)) {
	case 0:
		return any();
	case 1:
		return place - below(3);
	case 2:
		return place + below(0x400000);
	}
	return place + 0x1000 * below(0x400);
}

static __u8 number(__u8 most)
{
	return below(8) ? (__u8)below((__u64)most + 1) : (__u8)any();
}

static void new_params(void)
{
	params = (struct mpsd_policy_params){
		.mode = below(4) ? MPSD_MODE_ISOLATE : number(3),
		.deadline_ms = (__u32)(below(3) ? below(3) * 2000 : any()),
		.max_sinks = (__u32)(below(3) ? below(MAX_SINKS + 1) : any()), .nonreplayable = any() & 1,
		.stop_channels = any() & 1,
	};
}

static void new_space(void)
{
	while (sink_count)
		free(sinks[--sink_count]);
	free(space);
	space = calloc(1, sizeof(*space));
	if (!space)
		exit(2);
	now_ns = below(2) ? 0 : any() >> 1;
	last_step = MPSD_ACTION_NONE;
	new_params();
}

static struct mpsd_fault some_fault(void)
{
	bool replayable = any() & 1;

	return (struct mpsd_fault){
		.address = address(), .batch = below(6), .fault_type = number(4), .access = number(3),
		.uvm_reason = below(4) ? MPSD_REASON_INVALID_ADDRESS : number(7),
		.engine = below(4) ? (replayable ? MPSD_ENGINE_GRAPHICS : MPSD_ENGINE_CE) : number(4),
		.client_type = below(4) ? MPSD_CLIENT_GPC : number(3), .fatal = below(8), .replayable = replayable,
	};
}

/* A sink at any address: the policy must not assume that it covers the page. */
static struct mpsd_around some_around(const struct mpsd_fault *fault)
{
	struct mpsd_around around = {
		.sink = sink_count && below(2) ? sinks[below(sink_count)] : NULL,
		.beside = sink_count && below(2) ? sinks[below(sink_count)] : NULL, .free_first = address(),
		.free_last = address(), .range = below(4) ? MPSD_RANGE_FREE : number(6),
		.can_address = below(8), .hmm = !below(8), .ats = !below(8),
		.alone = !below(8),
	};

	if (below(2)) {
		around.free_first = fault->address - below(fault->address / 2 + 1);
		around.free_last = fault->address + below(~0ULL - fault->address + 1 ? ~0ULL - fault->address + 1 : 1);
	}
	return around;
}

static void check_sink(const struct mpsd_fault *fault, const struct mpsd_around *around,
		       const struct mpsd_decision *decision)
{
	__u64 last = decision->base + (decision->bytes - 1);

	CHECK(decision->bytes == 0x1000 || (decision->bytes >= 0x10000 && decision->bytes <= 0x200000));
	CHECK(!(decision->bytes & (decision->bytes - 1)) && !(decision->base & (decision->bytes - 1)));
	CHECK(decision->base <= fault->address && fault->address <= last);
	CHECK(around->free_first <= decision->base && last <= around->free_last);
	CHECK(decision->page_bytes == (decision->bytes == 0x1000 ? 0x1000 : 0x10000));
	CHECK(space->sinks < params.max_sinks);
	CHECK(!around->hmm || decision->bytes == 0x1000);
}

static void check_isolated(const struct mpsd_fault *fault, const struct mpsd_around *around)
{
	CHECK(params.mode == MPSD_MODE_ISOLATE && fault->fatal && !space->released);
	CHECK(fault->fault_type >= 1 && fault->fault_type <= 4 && fault->access >= 1 && fault->access <= 3);
	CHECK(fault->uvm_reason == 1 && (fault->replayable || params.nonreplayable));
	CHECK(fault->replayable == (fault->engine == MPSD_ENGINE_GRAPHICS));
	CHECK(!fault->replayable || fault->client_type == MPSD_CLIENT_GPC);
	CHECK(around->range == MPSD_RANGE_FREE || around->range == MPSD_RANGE_HOLE ||
	      (around->range == MPSD_RANGE_MAPPED && around->beside && fault->fault_type == 1));
	CHECK(around->can_address && !around->ats && !around->alone);
}

static void check_sunk_before(const struct mpsd_fault *fault, const struct mpsd_around *around,
			      const struct mpsd_decision *decision)
{
	const struct mpsd_sink *sink = around->range == MPSD_RANGE_MAPPED ? around->beside : around->sink;

	CHECK(sink && sink->hits <= MPSD_LOOP_HITS && !decision->report);
	CHECK(sink == around->beside || fault->address - sink->base < sink->bytes);
	CHECK(!decision->renew || (around->free_first <= sink->base && sink->hits && !decision->relink));
	CHECK(!decision->renew || around->range != MPSD_RANGE_MAPPED);
	CHECK(!decision->relink || sink->hits);
}

static void make_sink(const struct mpsd_fault *fault, struct mpsd_decision *decision)
{
	bool condemned = space->condemned;
	struct mpsd_sink *made = sink_count == MAX_SINKS || !below(8) ? NULL : malloc(sizeof(*made));

	if (!made) {
		mpsd_policy_failed(space, decision);
		CHECK(!mpsd_policy_isolates(decision) && space->condemned == condemned);
		return;
	}
	sinks[sink_count++] = made;
	mpsd_policy_sunk(&params, space, fault, decision, made, now_ns);
	CHECK(space->condemned && space->sinks == sink_count && mpsd_policy_isolates(decision));
	CHECK(made->base == decision->base && made->bytes == decision->bytes && !made->hits);
}

static void take_fault(void)
{
	struct mpsd_fault fault = some_fault();
	struct mpsd_sink *again = sink_count && !below(4) ? sinks[below(sink_count)] : NULL;
	struct mpsd_around around;
	struct mpsd_decision decision;
	struct mpsd_record record;

	if (again)
		fault.address = again->base + below(again->bytes);
	around = some_around(&fault);
	if (again)
		around.sink = again;
	memset(&decision, 0xa5, sizeof(decision));
	mpsd_policy_decide(&params, space, &fault, &around, &decision);
	if (mpsd_policy_isolates(&decision))
		check_isolated(&fault, &around);
	if (decision.action == MPSD_ACTION_SUNK) {
		check_sink(&fault, &around, &decision);
		make_sink(&fault, &decision);
	} else if (decision.action == MPSD_ACTION_SUNK_BEFORE) {
		check_sunk_before(&fault, &around, &decision);
	} else {
		CHECK(!decision.base && !decision.bytes && !decision.page_bytes);
	}
	CHECK(decision.why < MPSD_WHY_COUNT);
	mpsd_policy_describe(&params, space, &fault, &decision, MPSD_ACTION_NONE, &record);
	CHECK(record.size == sizeof(record) && record.action == decision.action && !record.reserved[2]);
}

static void take_step(void)
{
	bool condemned = space->condemned, released = space->released;
	enum mpsd_action step = mpsd_policy_deadline(&params, space, now_ns);

	if (step == MPSD_ACTION_NONE)
		return;
	CHECK(condemned && !space->ended && step > last_step);
	CHECK(last_step != MPSD_ACTION_NONE || step == MPSD_ACTION_KILL);
	CHECK(space->released == (released || step == MPSD_ACTION_GIVE_UP));
	CHECK(mpsd_policy_deadline(&params, space, now_ns) == MPSD_ACTION_NONE);
	last_step = step;
}

static void take_orphan(void)
{
	static struct mpsd_orphans orphans;
	static __u64 told_ns;
	__u32 before = orphans.faults;

	if (now_ns < told_ns)
		memset(&orphans, 0, sizeof(orphans));
	if (!mpsd_policy_orphan(&params, &orphans, now_ns))
		return;
	CHECK(orphans.faults == 1 || now_ns - told_ns >= MPSD_ORPHAN_INTERVAL_NS || before == 0);
	CHECK(params.mode == MPSD_MODE_REPORT || params.mode == MPSD_MODE_ISOLATE);
	told_ns = now_ns;
}

static void ask(void)
{
	bool condemned = space->condemned;
	bool killable = condemned && space->next_step == MPSD_ACTION_KILL && !space->kill_asked;
	struct mpsd_record record;

	switch (below(7)) {
	case 0:
		CHECK((mpsd_policy_acknowledge(&params, space) == MPSD_ANSWER_INNOCENT) == !condemned);
		break;
	case 1:
		mpsd_policy_abandoned(&params, space, now_ns);
		CHECK(!space->acknowledged);
		break;
	case 2:
		CHECK((mpsd_policy_kill(space, now_ns) == MPSD_ANSWER_OK) == killable);
		CHECK(!killable || space->deadline_ns <= now_ns);
		break;
	case 3:
		if (!below(8))
			mpsd_policy_release(space);
		break;
	case 4:
		if (!below(8))
			mpsd_policy_ended(space);
		break;
	case 5:
		mpsd_policy_describe(&params, space, NULL, NULL, MPSD_ACTION_KILL, &record);
		CHECK(record.action == MPSD_ACTION_KILL && !record.address && record.deadline_ns == space->deadline_ns);
		break;
	case 6:
		take_orphan();
		break;
	}
}

static void one_step(void)
{
	bool condemned, released;

	if (!below(200))
		new_space();
	if (!below(50))
		new_params();
	condemned = space->condemned;
	released = space->released;
	now_ns += below(4) ? below(1000) * 1000000 : 0;
	if (below(4))
		take_fault();
	else if (below(2))
		take_step();
	else
		ask();
	CHECK(space->condemned >= condemned && space->released >= released);
	CHECK(space->condemned == (space->sinks > 0));
	CHECK(space->next_step == MPSD_ACTION_NONE || space->condemned);
}

int main(int argc, char **argv)
{
	__u64 steps = argc == 3 ? strtoull(argv[2], NULL, 0) : 0;

	if (!steps)
		return 2;
	seed = strtoull(argv[1], NULL, 0);
	state = seed * 0x9e3779b97f4a7c15ULL + 1;
	new_space();
	for (step_number = 0; step_number < steps; step_number++)
		one_step();
	new_params();
	new_space();
	free(space);
	space = NULL;
	return 0;
}
