// SPDX-License-Identifier: GPL-2.0 OR MIT
/* What the policy knows of a fault or a step, as a record. */
#include "mpsd-policy.h"

static __u16 flags_of(const struct mpsd_space *space, const struct mpsd_fault *fault)
{
	__u16 flags = 0;

	if (fault && fault->replayable)
		flags |= MPSD_FLAG_REPLAYABLE;
	if (space->condemned)
		flags |= MPSD_FLAG_CONDEMNED;
	if (space->acknowledged)
		flags |= MPSD_FLAG_ACKNOWLEDGED;
	if (space->released)
		flags |= MPSD_FLAG_RELEASED;
	return flags;
}

static void describe_fault(const struct mpsd_fault *fault, struct mpsd_record *record)
{
	record->address = fault->address;
	record->fault_type = fault->fault_type;
	record->access = fault->access;
	record->uvm_reason = fault->uvm_reason;
	record->engine = fault->engine;
	record->client_type = fault->client_type;
}

void mpsd_policy_describe(const struct mpsd_policy_params *params, const struct mpsd_space *space,
			  const struct mpsd_fault *fault, const struct mpsd_decision *decision,
			  enum mpsd_action action, struct mpsd_record *record)
{
	*record = (struct mpsd_record){
		.version = MPSD_ABI_VERSION,
		.size = sizeof(*record),
		.action = action,
		.mode = (__u8)params->mode,
		.deadline_ns = space->deadline_ns,
		.faults = space->faults,
		.sinks = space->sinks,
		.channel = MPSD_NO_CHANNEL,
		.gpc = MPSD_NO_ID,
		.veid = MPSD_NO_ID,
		.flags = flags_of(space, fault),
	};
	if (fault)
		describe_fault(fault, record);
	if (!decision)
		return;
	record->action = (__u8)decision->action;
	record->why = (__u8)decision->why;
	record->sink_base = decision->base;
	record->sink_bytes = decision->bytes;
}
