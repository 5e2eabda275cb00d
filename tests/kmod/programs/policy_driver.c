// SPDX-License-Identifier: MIT
/*
 * The policy behind a pipe: each request and each answer is WORDS u64. The program keeps one space and its
 * sinks. The request carries what a caller in the kernel looks up: the gap, the sink that covers the page.
 */
#include "mpsd-policy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORDS 20
#define SINKS 4096

enum request {
	NEW_SPACE, SET_PARAMS, FAULT, DEADLINE, ACKNOWLEDGE, ABANDONED, KILL, RELEASE, ENDED, RECORD, STEP_RECORD,
	ORPHAN,
};

static struct mpsd_policy_params params;
static struct mpsd_space *space;
static struct mpsd_fault fault;
static struct mpsd_decision decision;
static struct mpsd_sink *sinks[SINKS];		/* each a block of its own, for the address sanitizer */
static __u32 sink_count;
static struct mpsd_orphans orphans;

static void new_space(void)
{
	while (sink_count)
		free(sinks[--sink_count]);
	free(space);
	space = calloc(1, sizeof(*space));
	memset(&orphans, 0, sizeof(orphans));
	memset(&decision, 0, sizeof(decision));
	if (!space)
		exit(2);
}

static void set_params(const __u64 *word)
{
	params.mode = (__u32)word[1];
	params.deadline_ms = (__u32)word[2];
	params.max_sinks = (__u32)word[3];
	params.nonreplayable = word[4];
	params.stop_channels = word[5];
}

static void read_fault(const __u64 *word)
{
	fault = (struct mpsd_fault){
		.address = word[1], .batch = word[2], .fault_type = (__u8)word[3], .access = (__u8)word[4],
		.uvm_reason = (__u8)word[5], .engine = (__u8)word[6], .client_type = (__u8)word[7],
		.fatal = word[8], .replayable = word[9],
	};
}

/* The caller's part: make the sink, or fail to. */
static void sink(__u64 now_ns, bool fails)
{
	struct mpsd_sink *made = fails || sink_count == SINKS ? NULL : malloc(sizeof(*made));

	if (!made) {
		mpsd_policy_failed(space, &decision);
		return;
	}
	sinks[sink_count++] = made;
	mpsd_policy_sunk(&params, space, &fault, &decision, made, now_ns);
}

static struct mpsd_sink *named(__u64 number)
{
	return number && number <= sink_count ? sinks[number - 1] : NULL;
}

static void take_fault(const __u64 *word)
{
	struct mpsd_around around = {
		.sink = named(word[10] & 0xffffffffU), .beside = named(word[10] >> 32),
		.free_first = word[11], .free_last = word[12], .range = (__u32)word[13],
		.can_address = word[14], .hmm = word[15], .ats = word[16], .alone = word[17],
	};

	read_fault(word);
	mpsd_policy_decide(&params, space, &fault, &around, &decision);
	if (decision.action == MPSD_ACTION_SUNK)
		sink(word[18], word[19]);
}

static __u64 perform(const __u64 *word)
{
	switch (word[0]) {
	case NEW_SPACE:
		new_space();
		return 0;
	case SET_PARAMS:
		set_params(word);
		return 0;
	case FAULT:
		take_fault(word);
		return 0;
	case DEADLINE:
		return mpsd_policy_deadline(&params, space, word[1]);
	case ACKNOWLEDGE:
		return mpsd_policy_acknowledge(&params, space);
	case ABANDONED:
		mpsd_policy_abandoned(&params, space, word[1]);
		return 0;
	case KILL:
		return mpsd_policy_kill(space, word[1]);
	case RELEASE:
		mpsd_policy_release(space);
		return 0;
	case ENDED:
		mpsd_policy_ended(space);
		return 0;
	case ORPHAN:
		return mpsd_policy_orphan(&params, &orphans, word[1]);
	}
	exit(3);
}

static void tell(const __u64 *word, __u64 *answer)
{
	const struct mpsd_sink *covering = word[0] == FAULT ? named(word[10] & 0xffffffffU) : NULL;
	const struct mpsd_sink *beside = word[0] == FAULT ? named(word[10] >> 32) : NULL;
	__u64 result = perform(word);
	__u64 told[WORDS] = {
		result, decision.action, decision.why, decision.base, decision.bytes,
		decision.page_bytes, (decision.report ? 1u : 0u) | (decision.renew ? 2u : 0u) |
			(decision.relink ? 4u : 0u),
		mpsd_policy_isolates(&decision), space->faults,
		space->sinks, space->condemned, space->acknowledged, space->released, space->ended,
		space->next_step, space->deadline_ns, covering ? covering->hits : 0, space->condemned_ns,
		beside ? beside->hits : 0, orphans.faults,
	};

	memcpy(answer, told, sizeof(told));
}

static void answer(const __u64 *word, __u64 *reply)
{
	_Static_assert(sizeof(struct mpsd_record) == WORDS * sizeof(__u64), "a record is one answer");

	if (word[0] == RECORD)
		mpsd_policy_describe(&params, space, &fault, &decision, MPSD_ACTION_NONE, (void *)reply);
	else if (word[0] == STEP_RECORD)
		mpsd_policy_describe(&params, space, word[2] ? &fault : NULL, NULL, (enum mpsd_action)word[1],
				     (void *)reply);
	else
		tell(word, reply);
}

int main(void)
{
	__u64 word[WORDS], reply[WORDS];

	setbuf(stdin, NULL);
	new_space();
	while (fread(word, sizeof(word), 1, stdin) == 1) {
		answer(word, reply);
		if (fwrite(reply, sizeof(reply), 1, stdout) != 1 || fflush(stdout))
			return 1;
	}
	new_space();
	free(space);
	space = NULL;
	return 0;
}
