// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Which process made which VA space. Our state of it is kept beside UVM's, found by the space's address: no
 * structure of UVM's gets a field.
 */
#include <linux/hashtable.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "uvm_common.h"
#include "mpsd-glue.h"
#include "mpsd-uvm.h"

static DEFINE_HASHTABLE(owners, 8);
static DEFINE_SPINLOCK(owners_lock);
static u64 last_id;

static void owner_free(struct kref *references)
{
	struct mpsd_owner *owner = container_of(references, struct mpsd_owner, references);

	put_pid(owner->pid);
	kfree(owner);
}

void mpsd_owner_put(struct mpsd_owner *owner)
{
	kref_put(&owner->references, owner_free);
}

struct mpsd_owner *mpsd_owner_get(uvm_va_space_t *va_space)
{
	struct mpsd_owner *owner, *found = NULL;

	spin_lock(&owners_lock);
	hash_for_each_possible(owners, owner, node, (unsigned long)va_space) {
		if (owner->va_space == va_space)
			found = owner;
	}
	if (found)
		kref_get(&found->references);
	spin_unlock(&owners_lock);
	return found;
}

struct mpsd_owner *mpsd_owner_get_by_id(u64 id)
{
	struct mpsd_owner *owner, *found = NULL;
	int bucket;

	spin_lock(&owners_lock);
	hash_for_each(owners, bucket, owner, node) {
		if (owner->id == id)
			found = owner;
	}
	if (found)
		kref_get(&found->references);
	spin_unlock(&owners_lock);
	return found;
}

/* The one with the lowest id after `id`, or NULL: a way through the table that needs no lock in between. */
static struct mpsd_owner *owner_after(u64 id)
{
	struct mpsd_owner *owner, *found = NULL;
	int bucket;

	spin_lock(&owners_lock);
	hash_for_each(owners, bucket, owner, node) {
		if (owner->id > id && (!found || owner->id < found->id))
			found = owner;
	}
	if (found)
		kref_get(&found->references);
	spin_unlock(&owners_lock);
	return found;
}

static void abandon(struct mpsd_owner *owner, const void *reader)
{
	struct mpsd_policy_params params = mpsd_params();

	mutex_lock(&owner->lock);
	if (owner->acknowledged_by == reader) {
		owner->acknowledged_by = NULL;
		mpsd_policy_abandoned(&params, &owner->policy, mpsd_now_ns());
		mpsd_steps_arm(owner);
	}
	mutex_unlock(&owner->lock);
}

void mpsd_owners_abandon(const void *reader)
{
	struct mpsd_owner *owner;
	u64 id = 0;

	while ((owner = owner_after(id)) != NULL) {
		id = owner->id;
		abandon(owner, reader);
		mpsd_owner_put(owner);
	}
}

/*
 * Without memory for it the space has no owner, and its faults go the stock way. The group leader is asked
 * under RCU: another thread of the process may be taking its place by exec.
 */
void mpsd_space_created(uvm_va_space_t *va_space)
{
	struct mpsd_owner *owner = kzalloc(sizeof(*owner), GFP_KERNEL);

	if (!owner) {
		pr_warn("mpsd: out of memory: an address space of %s is not isolated\n", current->comm);
		return;
	}
	kref_init(&owner->references);
	mutex_init(&owner->lock);
	INIT_LIST_HEAD(&owner->sinks);
	INIT_DELAYED_WORK(&owner->steps, mpsd_steps_work);
	owner->va_space = va_space;
	owner->pid = get_pid(task_tgid(current));
	rcu_read_lock();
	owner->start_ns = current->group_leader->start_boottime;
	rcu_read_unlock();
	get_task_comm(owner->comm, current);
	spin_lock(&owners_lock);
	owner->id = ++last_id;
	hash_add(owners, &owner->node, (unsigned long)va_space);
	spin_unlock(&owners_lock);
}

void mpsd_space_stopped(uvm_va_space_t *va_space)
{
	struct mpsd_owner *owner = mpsd_owner_get(va_space);

	if (!owner)
		return;
	mutex_lock(&owner->lock);
	mpsd_policy_ended(&owner->policy);
	owner->ended = true;
	mutex_unlock(&owner->lock);
	cancel_delayed_work(&owner->steps);
	mpsd_owner_put(owner);
}

/* The work item may be in the middle of a step that uses the VA space: it is gone only after that. */
void mpsd_space_destroyed(uvm_va_space_t *va_space)
{
	struct mpsd_owner *owner = mpsd_owner_get(va_space);

	if (!owner)
		return;
	cancel_delayed_work_sync(&owner->steps);
	UVM_ASSERT(list_empty(&owner->sinks));
	spin_lock(&owners_lock);
	hash_del(&owner->node);
	spin_unlock(&owners_lock);
	mpsd_owner_put(owner);
	mpsd_owner_put(owner);
}
