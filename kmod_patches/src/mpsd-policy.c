// SPDX-License-Identifier: GPL-2.0 OR MIT
#include "mpsd-policy.h"

#define NS_PER_MS 1000000ULL

static void count(__u32 *counter)
{
	if (*counter != 0xffffffffU)
		++*counter;
}

static bool power_of_two(__u32 number)
{
	return number && !(number & (number - 1));
}

static bool records(const struct mpsd_policy_params *params)
{
	return params->mode == MPSD_MODE_REPORT || params->mode == MPSD_MODE_ISOLATE;
}

/* So many deadlines, in ns. */
static __u64 deadlines(const struct mpsd_policy_params *params, __u32 factor)
{
	__u32 ms = params->deadline_ms;

	if (ms < MPSD_DEADLINE_MIN_MS)
		ms = MPSD_DEADLINE_MIN_MS;
	if (ms > MPSD_DEADLINE_MAX_MS)
		ms = MPSD_DEADLINE_MAX_MS;
	return ms * NS_PER_MS * factor;
}

/* The case table */

static enum mpsd_why why_of_client(const struct mpsd_policy_params *params, const struct mpsd_fault *fault)
{
	if (fault->replayable) {
		if (fault->engine == MPSD_ENGINE_GRAPHICS && fault->client_type == MPSD_CLIENT_GPC)
			return MPSD_WHY_NONE;
		return MPSD_WHY_CLIENT;
	}
	if (fault->engine != MPSD_ENGINE_CE && fault->engine != MPSD_ENGINE_HOST)
		return MPSD_WHY_CLIENT;
	return params->nonreplayable ? MPSD_WHY_NONE : MPSD_WHY_NONREPLAYABLE;
}

static enum mpsd_why why_of_fault(const struct mpsd_policy_params *params, const struct mpsd_fault *fault)
{
	if (fault->fault_type < MPSD_FAULT_INVALID_PDE || fault->fault_type > MPSD_FAULT_ATOMIC)
		return MPSD_WHY_FAULT_TYPE;
	if (fault->access < MPSD_ACCESS_READ || fault->access > MPSD_ACCESS_ATOMIC)
		return MPSD_WHY_ACCESS;
	if (fault->uvm_reason == MPSD_REASON_PERMISSIONS)
		return MPSD_WHY_PERMISSIONS;
	if (fault->uvm_reason != MPSD_REASON_INVALID_ADDRESS)
		return MPSD_WHY_REASON;
	return why_of_client(params, fault);
}

/*
 * What the client has mapped beside a sink is without effect while nothing points to the table that they share: a
 * page of 2 MiB had taken the pointer's place, and was taken away.
 */
static bool lost_table(const struct mpsd_fault *fault, const struct mpsd_around *around)
{
	return around->range == MPSD_RANGE_MAPPED && around->beside && fault->fault_type == MPSD_FAULT_INVALID_PDE;
}

static enum mpsd_why why_of_place(const struct mpsd_fault *fault, const struct mpsd_around *around)
{
	switch (around->range) {
	case MPSD_RANGE_FREE:
	case MPSD_RANGE_HOLE:
		break;
	case MPSD_RANGE_MAPPED:
		if (lost_table(fault, around))
			break;
		return MPSD_WHY_PERMISSIONS;
	case MPSD_RANGE_MANAGED:
		return MPSD_WHY_MANAGED;
	case MPSD_RANGE_PROTECTED:
		return MPSD_WHY_PROTECTED;
	default:
		return MPSD_WHY_RANGE;
	}
	if (around->ats)
		return MPSD_WHY_ATS;
	return around->can_address ? MPSD_WHY_NONE : MPSD_WHY_UNADDRESSABLE;
}

/* The granule */

static bool fits(const struct mpsd_around *around, __u64 address, __u64 bytes)
{
	__u64 base = address & ~(bytes - 1);

	return around->free_first <= base && base + (bytes - 1) <= around->free_last;
}

/*
 * The more a space has sunk the wider the next: a sweep over unmapped memory would otherwise fault once for
 * each page. What HMM maps is not in the gap, so there only the page itself is known to be free.
 */
static __u64 granule(const struct mpsd_space *space, const struct mpsd_around *around, __u64 address)
{
	__u64 bytes = MPSD_MAX_SINK_BYTES;

	if (around->hmm)
		return MPSD_PAGE_BYTES;
	if (space->sinks < 5)
		bytes = MPSD_BIG_PAGE_BYTES << space->sinks;
	while (bytes >= MPSD_BIG_PAGE_BYTES && !fits(around, address, bytes))
		bytes >>= 1;
	return bytes < MPSD_BIG_PAGE_BYTES ? MPSD_PAGE_BYTES : bytes;
}

static enum mpsd_why why_of_room(const struct mpsd_policy_params *params, const struct mpsd_space *space,
				 const struct mpsd_around *around, __u64 address)
{
	if (!fits(around, address, MPSD_PAGE_BYTES))
		return MPSD_WHY_NO_GAP;
	if (space->sinks >= params->max_sinks || space->sinks >= MPSD_MAX_SINKS_LIMIT)
		return MPSD_WHY_TOO_MANY;
	return MPSD_WHY_NONE;
}

/* The loop guard */

/* The sink that ought to have kept the fault away, or NULL. */
static struct mpsd_sink *concerned(const struct mpsd_fault *fault, const struct mpsd_around *around)
{
	struct mpsd_sink *sink = around->sink;

	if (lost_table(fault, around))
		return around->beside;
	return sink && fault->address >= sink->base && fault->address - sink->base < sink->bytes ? sink : NULL;
}

/*
 * Faults that were under way while the sink was made show its pages once more, many of them in one batch.
 * A page that comes again and again is one that the sink does not help.
 */
static enum mpsd_why why_of_hits(const struct mpsd_sink *sink, __u64 batch)
{
	__u32 hits = sink->hits + (sink->batch != batch);

	return hits > MPSD_LOOP_HITS ? MPSD_WHY_LOOP : MPSD_WHY_NONE;
}

static void hit(struct mpsd_sink *sink, __u64 batch)
{
	if (sink->batch != batch && sink->hits <= MPSD_LOOP_HITS)
		sink->hits++;
	sink->batch = batch;
}

/*
 * A batch later the sink ought to have helped. The client may have mapped memory over it and taken that away
 * again, and the PTEs with it. Where something is mapped in part of it now the PTEs are left as they are.
 */
static bool renews(const struct mpsd_sink *sink, const struct mpsd_around *around)
{
	return around->range != MPSD_RANGE_MAPPED && around->free_first <= sink->base &&
	       sink->base + (sink->bytes - 1) <= around->free_last;
}

/* Deciding */

static enum mpsd_why why_not(const struct mpsd_policy_params *params, const struct mpsd_space *space,
			     const struct mpsd_fault *fault, const struct mpsd_around *around)
{
	const struct mpsd_sink *sink = concerned(fault, around);
	enum mpsd_why why = why_of_fault(params, fault);

	if (why == MPSD_WHY_NONE)
		why = why_of_place(fault, around);
	if (why == MPSD_WHY_NONE && space->released)
		why = MPSD_WHY_RELEASED;
	if (why == MPSD_WHY_NONE)
		why = sink ? why_of_hits(sink, fault->batch) :
			     why_of_room(params, space, around, fault->address);
	/* The last reason: it tells of what would have been sunk for the sake of others. */
	return why == MPSD_WHY_NONE && around->alone ? MPSD_WHY_ALONE : why;
}

static void answer_by_stock(struct mpsd_space *space, struct mpsd_decision *decision, enum mpsd_action action,
			    enum mpsd_why why)
{
	__u32 *seen = &space->seen[action == MPSD_ACTION_REFUSED][why];

	count(seen);
	*decision = (struct mpsd_decision){ .action = action, .why = why, .report = power_of_two(*seen) };
}

static void choose_sink(const struct mpsd_space *space, const struct mpsd_fault *fault,
			const struct mpsd_around *around, struct mpsd_decision *decision)
{
	__u64 bytes = granule(space, around, fault->address);

	decision->action = MPSD_ACTION_SUNK;
	decision->base = fault->address & ~(bytes - 1);
	decision->bytes = bytes;
	decision->page_bytes = bytes < MPSD_BIG_PAGE_BYTES ? MPSD_PAGE_BYTES : MPSD_BIG_PAGE_BYTES;
}

static void isolate(struct mpsd_space *space, const struct mpsd_fault *fault,
		    const struct mpsd_around *around, enum mpsd_why why, struct mpsd_decision *decision)
{
	struct mpsd_sink *sink = concerned(fault, around);
	bool later = sink && sink->batch != fault->batch, renew = later && renews(sink, around);

	if (sink)
		hit(sink, fault->batch);
	if (why != MPSD_WHY_NONE)
		answer_by_stock(space, decision, MPSD_ACTION_REFUSED, why);
	else if (sink)
		*decision = (struct mpsd_decision){
			.action = MPSD_ACTION_SUNK_BEFORE,
			.renew = renew,
			.relink = later && !renew,
		};
	else
		choose_sink(space, fault, around, decision);
}

void mpsd_policy_decide(const struct mpsd_policy_params *params, struct mpsd_space *space,
			const struct mpsd_fault *fault, const struct mpsd_around *around,
			struct mpsd_decision *decision)
{
	enum mpsd_why why;

	*decision = (struct mpsd_decision){ .action = MPSD_ACTION_NONE };
	/* UVM cancels innocent entries too, when it cancels a whole batch: they are nobody's fault. */
	if (!fault->fatal || !records(params))
		return;
	count(&space->faults);
	why = why_not(params, space, fault, around);
	if (params->mode == MPSD_MODE_REPORT)
		answer_by_stock(space, decision, MPSD_ACTION_REPORTED, why);
	else
		isolate(space, fault, around, why, decision);
}

static void condemn(const struct mpsd_policy_params *params, struct mpsd_space *space, __u64 now_ns)
{
	space->condemned = true;
	space->condemned_ns = now_ns;
	if (space->ended)
		return;
	space->next_step = MPSD_ACTION_KILL;
	space->deadline_ns = now_ns + deadlines(params, 1);
}

void mpsd_policy_sunk(const struct mpsd_policy_params *params, struct mpsd_space *space,
		      const struct mpsd_fault *fault, struct mpsd_decision *decision,
		      struct mpsd_sink *sink, __u64 now_ns)
{
	*sink = (struct mpsd_sink){ .base = decision->base, .bytes = decision->bytes, .batch = fault->batch };
	count(&space->sinks);
	decision->report = power_of_two(space->sinks);
	if (!space->condemned)
		condemn(params, space, now_ns);
}

void mpsd_policy_failed(struct mpsd_space *space, struct mpsd_decision *decision)
{
	answer_by_stock(space, decision, MPSD_ACTION_REFUSED, MPSD_WHY_FAILED);
}

bool mpsd_policy_isolates(const struct mpsd_decision *decision)
{
	return decision->action == MPSD_ACTION_SUNK || decision->action == MPSD_ACTION_SUNK_BEFORE;
}

/* Steps against a condemned space */

static void schedule(struct mpsd_space *space, enum mpsd_action step, __u64 at_ns)
{
	space->next_step = step;
	space->deadline_ns = at_ns;
}

/* Counted from when a step is taken, not from when it was due: a late timer must not run them together. */
enum mpsd_action mpsd_policy_deadline(const struct mpsd_policy_params *params, struct mpsd_space *space,
				      __u64 now_ns)
{
	enum mpsd_action step = space->next_step;

	if (step == MPSD_ACTION_NONE || now_ns < space->deadline_ns)
		return MPSD_ACTION_NONE;
	if (step == MPSD_ACTION_KILL && params->stop_channels) {
		schedule(space, MPSD_ACTION_STOP, now_ns + deadlines(params, 1));
	} else if (step == MPSD_ACTION_KILL) {
		schedule(space, MPSD_ACTION_GIVE_UP, now_ns + deadlines(params, MPSD_PATIENCE));
	} else if (step == MPSD_ACTION_STOP) {
		schedule(space, MPSD_ACTION_GIVE_UP, now_ns + deadlines(params, MPSD_PATIENCE - 1));
	} else {
		schedule(space, MPSD_ACTION_NONE, 0);
		space->released = true;
	}
	return step;
}

enum mpsd_answer mpsd_policy_acknowledge(const struct mpsd_policy_params *params, struct mpsd_space *space)
{
	__u64 latest_ns = space->condemned_ns + deadlines(params, MPSD_PATIENCE);

	if (!space->condemned)
		return MPSD_ANSWER_INNOCENT;
	if (space->next_step != MPSD_ACTION_KILL || space->kill_asked)
		return MPSD_ANSWER_ALREADY;
	space->acknowledged = true;
	if (space->deadline_ns < latest_ns)
		space->deadline_ns = latest_ns;
	return MPSD_ANSWER_OK;
}

void mpsd_policy_abandoned(const struct mpsd_policy_params *params, struct mpsd_space *space, __u64 now_ns)
{
	__u64 soon_ns = now_ns + deadlines(params, 1);

	if (!space->acknowledged)
		return;
	space->acknowledged = false;
	if (space->next_step == MPSD_ACTION_KILL && space->deadline_ns > soon_ns)
		space->deadline_ns = soon_ns;
}

enum mpsd_answer mpsd_policy_kill(struct mpsd_space *space, __u64 now_ns)
{
	if (!space->condemned)
		return MPSD_ANSWER_INNOCENT;
	if (space->next_step != MPSD_ACTION_KILL || space->kill_asked)
		return MPSD_ANSWER_ALREADY;
	space->kill_asked = true;
	if (space->deadline_ns > now_ns)
		space->deadline_ns = now_ns;
	return MPSD_ANSWER_OK;
}

void mpsd_policy_release(struct mpsd_space *space)
{
	space->released = true;
}

void mpsd_policy_ended(struct mpsd_space *space)
{
	space->ended = true;
	schedule(space, MPSD_ACTION_NONE, 0);
}

bool mpsd_policy_orphan(const struct mpsd_policy_params *params, struct mpsd_orphans *orphans, __u64 now_ns)
{
	bool first = !orphans->faults;

	if (!records(params))
		return false;
	count(&orphans->faults);
	if (!first && now_ns - orphans->reported_ns < MPSD_ORPHAN_INTERVAL_NS)
		return false;
	orphans->reported_ns = now_ns;
	return true;
}
