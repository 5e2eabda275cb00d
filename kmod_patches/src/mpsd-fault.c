// SPDX-License-Identifier: GPL-2.0 OR MIT
/* From UVM's fault entry to a decision, and from the decision to what is done. */
#include "uvm_common.h"
#include "uvm_gpu.h"
#include "uvm_va_space.h"
#include "mpsd-glue.h"
#include "mpsd-uvm.h"

/* Each is changed under its GPU's service lock, of replayable or of other faults. */
static struct {
	struct mpsd_orphans orphans;
	u64 pass;
	u32 last_index;
} gpus[UVM_ID_MAX_GPUS];

/* A type that no driver of the range 535 to 595 has by name is unknown: the stock answer. */
static u8 type_of(uvm_fault_type_t type)
{
	switch (type) {
	case UVM_FAULT_TYPE_INVALID_PDE:
		return MPSD_FAULT_INVALID_PDE;
	case UVM_FAULT_TYPE_INVALID_PTE:
		return MPSD_FAULT_INVALID_PTE;
	case UVM_FAULT_TYPE_ATOMIC:
		return MPSD_FAULT_ATOMIC;
	case UVM_FAULT_TYPE_WRITE:
		return MPSD_FAULT_WRITE;
	case UVM_FAULT_TYPE_PDE_SIZE:
		return MPSD_FAULT_PDE_SIZE;
	case UVM_FAULT_TYPE_VA_LIMIT_VIOLATION:
		return MPSD_FAULT_VA_LIMIT;
	case UVM_FAULT_TYPE_UNBOUND_INST_BLOCK:
		return MPSD_FAULT_UNBOUND_INSTANCE;
	case UVM_FAULT_TYPE_PRIV_VIOLATION:
		return MPSD_FAULT_PRIVILEGE;
	case UVM_FAULT_TYPE_PITCH_MASK_VIOLATION:
		return MPSD_FAULT_PITCH;
	case UVM_FAULT_TYPE_WORK_CREATION:
		return MPSD_FAULT_WORK_CREATION;
	case UVM_FAULT_TYPE_UNSUPPORTED_APERTURE:
		return MPSD_FAULT_APERTURE;
	case UVM_FAULT_TYPE_COMPRESSION_FAILURE:
		return MPSD_FAULT_COMPRESSION;
	case UVM_FAULT_TYPE_UNSUPPORTED_KIND:
		return MPSD_FAULT_KIND;
	case UVM_FAULT_TYPE_REGION_VIOLATION:
		return MPSD_FAULT_REGION;
	case UVM_FAULT_TYPE_POISONED:
		return MPSD_FAULT_POISON;
	default:
		return 0;
	}
}

static u8 access_of(uvm_fault_access_type_t access)
{
	switch (access) {
	case UVM_FAULT_ACCESS_TYPE_READ:
		return MPSD_ACCESS_READ;
	case UVM_FAULT_ACCESS_TYPE_WRITE:
		return MPSD_ACCESS_WRITE;
	case UVM_FAULT_ACCESS_TYPE_ATOMIC_WEAK:
	case UVM_FAULT_ACCESS_TYPE_ATOMIC_STRONG:
		return MPSD_ACCESS_ATOMIC;
	case UVM_FAULT_ACCESS_TYPE_PREFETCH:
		return MPSD_ACCESS_PREFETCH;
	default:
		return 0;
	}
}

static u8 engine_of(uvm_mmu_engine_type_t engine)
{
	switch (engine) {
	case UVM_MMU_ENGINE_TYPE_GRAPHICS:
		return MPSD_ENGINE_GRAPHICS;
	case UVM_MMU_ENGINE_TYPE_HOST:
		return MPSD_ENGINE_HOST;
	case UVM_MMU_ENGINE_TYPE_CE:
		return MPSD_ENGINE_CE;
	default:
		return 0;
	}
}

/* UVM's reasons have the numbers of its tools interface, which are ours. */
static struct mpsd_fault fault_of(const uvm_fault_buffer_entry_t *entry, u64 batch, bool replayable)
{
	return (struct mpsd_fault){
		.address = entry->fault_address,
		/* The two kinds count their batches on their own. */
		.batch = batch << 1 | replayable,
		.fault_type = type_of(entry->fault_type),
		.access = access_of(entry->fault_access_type),
		.uvm_reason = (u8)entry->fatal_reason,
		.engine = engine_of(entry->fault_source.mmu_engine_type),
		.client_type = entry->fault_source.client_type == UVM_FAULT_CLIENT_TYPE_GPC ?
			       MPSD_CLIENT_GPC : MPSD_CLIENT_HUB,
		.fatal = entry->is_fatal,
		.replayable = replayable,
	};
}

static void describe_source(const uvm_gpu_t *gpu, const uvm_fault_buffer_entry_t *entry,
			    struct mpsd_record *record)
{
	record->client = entry->fault_source.client_id;
	if (!entry->is_replayable)
		record->channel = entry->fault_source.channel_id;
	else if (entry->fault_source.client_type == UVM_FAULT_CLIENT_TYPE_GPC)
		record->gpc = entry->fault_source.gpc_id;
	if (entry->is_replayable)
		record->veid = entry->fault_source.ve_id;
	memcpy(record->gpu_uuid, gpu->parent->uuid.uuid, sizeof(record->gpu_uuid));
}

static void make_sink(struct mpsd_owner *owner, uvm_gpu_va_space_t *gpu_va_space,
		      const struct mpsd_policy_params *params, const struct mpsd_fault *fault,
		      struct mpsd_decision *decision)
{
	bool before = owner->policy.condemned;
	struct mpsd_sink_node *node;

	if (mpsd_sink_make(gpu_va_space, decision, &node) != NV_OK) {
		mpsd_policy_failed(&owner->policy, decision);
		return;
	}
	mpsd_policy_sunk(params, &owner->policy, fault, decision, &node->sink, mpsd_now_ns());
	list_add(&node->list, &owner->sinks);
	mpsd_steps_arm(owner);
	if (!before)
		pr_warn("mpsd: isolated a fault of pid %d (%s) at 0x%llx; the client must be evicted\n",
			pid_nr(owner->pid), owner->comm, fault->address);
}

static bool isolate_locked(struct mpsd_owner *owner, uvm_gpu_va_space_t *gpu_va_space,
			   const uvm_fault_buffer_entry_t *entry, const struct mpsd_fault *fault)
{
	struct mpsd_policy_params params = mpsd_params();
	struct mpsd_decision decision;
	struct mpsd_around around;
	struct mpsd_record record;
	uvm_mutex_t *mappings;

	mappings = mpsd_sink_around(owner, gpu_va_space, fault->address, &around);
	mpsd_policy_decide(&params, &owner->policy, fault, &around, &decision);
	if (decision.action == MPSD_ACTION_SUNK)
		make_sink(owner, gpu_va_space, &params, fault, &decision);
	else if ((decision.renew && mpsd_sink_renew(around.sink) != NV_OK) ||
		 (decision.relink && mpsd_sink_relink(gpu_va_space, fault->address) != NV_OK))
		mpsd_policy_failed(&owner->policy, &decision);
	if (mappings)
		uvm_mutex_unlock(mappings);
	if (decision.report) {
		mpsd_policy_describe(&params, &owner->policy, fault, &decision, decision.action, &record);
		describe_source(gpu_va_space->gpu, entry, &record);
		mpsd_report(owner, &record);
	}
	return mpsd_policy_isolates(&decision);
}

static bool isolate(uvm_gpu_t *gpu, uvm_va_space_t *va_space, const uvm_fault_buffer_entry_t *entry,
		    const struct mpsd_fault *fault)
{
	uvm_gpu_va_space_t *gpu_va_space;
	struct mpsd_owner *owner;
	bool isolated = false;

	if (!fault->fatal || mpsd_params().mode == MPSD_MODE_OFF)
		return false;
	owner = mpsd_owner_get(va_space);
	if (!owner)
		return false;
	mutex_lock(&owner->lock);
	gpu_va_space = uvm_gpu_va_space_get(va_space, gpu);
	if (gpu_va_space)
		isolated = isolate_locked(owner, gpu_va_space, entry, fault);
	mutex_unlock(&owner->lock);
	mpsd_owner_put(owner);
	return isolated;
}

bool mpsd_isolate_replayable(uvm_gpu_t *gpu, uvm_va_space_t *va_space, uvm_fault_buffer_entry_t *entry,
			     NvU32 batch)
{
	struct mpsd_fault fault = fault_of(entry, batch, true);

	return isolate(gpu, va_space, entry, &fault);
}

/*
 * UVM counts a batch for each of these faults. It takes all that are there and goes through them from the first to
 * the last, and we see some of them: where the index does not grow a new pass has begun, at the latest.
 */
static u64 pass_of(const uvm_gpu_t *gpu, const uvm_fault_buffer_entry_t *entry)
{
	u32 at = uvm_id_gpu_index(gpu->id);

	if (entry->non_replayable.buffer_index <= gpus[at].last_index)
		gpus[at].pass++;
	gpus[at].last_index = entry->non_replayable.buffer_index;
	return gpus[at].pass;
}

bool mpsd_isolate_non_replayable(uvm_gpu_t *gpu, uvm_va_space_t *va_space, uvm_fault_buffer_entry_t *entry)
{
	struct mpsd_fault fault = fault_of(entry, pass_of(gpu, entry), false);

	return isolate(gpu, va_space, entry, &fault);
}

/* One that was fatal from the start, or that UVM could not serve, was not offered before: it is only told. */
void mpsd_given_back(uvm_gpu_t *gpu, uvm_va_space_t *va_space, uvm_fault_buffer_entry_t *entry)
{
	struct mpsd_fault fault = fault_of(entry, gpus[uvm_id_gpu_index(gpu->id)].pass, false);

	if (entry->is_fatal && entry->fatal_reason != UvmEventFatalReasonInvalidFaultType)
		return;
	if (!entry->is_fatal)
		fault.uvm_reason = 0;
	fault.fatal = true;
	isolate(gpu, va_space, entry, &fault);
}

void mpsd_orphan(uvm_gpu_t *gpu, uvm_fault_buffer_entry_t *entry)
{
	struct mpsd_orphans *orphans = &gpus[uvm_id_gpu_index(gpu->id)].orphans;
	struct mpsd_policy_params params = mpsd_params();
	struct mpsd_fault fault = fault_of(entry, 0, true);
	const struct mpsd_space unknown = {};
	struct mpsd_record record;

	if (!mpsd_policy_orphan(&params, orphans, mpsd_now_ns()))
		return;
	mpsd_policy_describe(&params, &unknown, &fault, NULL, MPSD_ACTION_ORPHAN, &record);
	record.faults = orphans->faults;
	describe_source(gpu, entry, &record);
	mpsd_report(NULL, &record);
}
