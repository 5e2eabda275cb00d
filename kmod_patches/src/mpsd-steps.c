// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * What is done to a condemned client that nobody evicts. Its UVM files are held from before it is killed until
 * the last step: with the last of them its page directory would go from under work that is still running, and
 * that ends everybody in its channel group.
 */
#include <linux/fdtable.h>
#include <linux/file.h>
#include <linux/sched/signal.h>
#include <linux/sched/task.h>

#include "uvm_common.h"
#include "uvm_va_space.h"
#include "mpsd-glue.h"

struct held {
	struct mpsd_owner *owner;
	const struct files_struct *seen;
	unsigned int count;
};

static bool is_of(struct file *file, uvm_va_space_t *va_space)
{
	void *pointed = NULL;

	if (!uvm_file_is_nvidia_uvm(file))
		return false;
	/* The file of the process's memory points to the VA space's file. */
	if (uvm_fd_type(file, &pointed) == UVM_FD_MM)
		file = pointed;
	return uvm_fd_va_space(file) == va_space;
}

static bool is_held(const struct mpsd_owner *owner, const struct file *file)
{
	unsigned int at;

	for (at = 0; at < MPSD_HELD_FILES; at++) {
		if (owner->held[at] == file)
			return true;
	}
	return false;
}

/* A duplicated descriptor is the same file. */
static int hold_file(const void *data, struct file *file, unsigned int fd)
{
	struct held *held = (struct held *)data;

	if (held->count < MPSD_HELD_FILES && is_of(file, held->owner->va_space) && !is_held(held->owner, file))
		held->owner->held[held->count++] = get_file(file);
	return 0;
}

/* The group's leader may have ended before its other threads, and has no files then. */
static unsigned int hold_files(struct mpsd_owner *owner)
{
	struct held held = { .owner = owner };
	struct task_struct *leader, *thread;

	rcu_read_lock();
	leader = pid_task(owner->pid, PIDTYPE_TGID);
	if (leader) {
		for_each_thread(leader, thread) {
			task_lock(thread);
			if (thread->files && thread->files != held.seen)
				iterate_fd(thread->files, 0, hold_file, &held);
			held.seen = thread->files;
			task_unlock(thread);
		}
	}
	rcu_read_unlock();
	return held.count;
}

static void let_files_go(struct mpsd_owner *owner)
{
	unsigned int at;

	for (at = 0; at < MPSD_HELD_FILES; at++) {
		if (owner->held[at])
			fput(owner->held[at]);
		owner->held[at] = NULL;
	}
}

/* A process that has none of the files has nothing to do with the address space any more: after an exec, say. */
static bool kill_owner(struct mpsd_owner *owner)
{
	unsigned int files = hold_files(owner);

	if (!files) {
		pr_warn("mpsd: not killing pid %d (%s): it has released the address space of the isolated faults\n",
			pid_nr(owner->pid), owner->comm);
		return false;
	}
	pr_warn("mpsd: killing pid %d (%s): its faults were isolated, and mpsd did not evict it in time; %u files held\n",
		pid_nr(owner->pid), owner->comm, files);
	kill_pid(owner->pid, SIGKILL, 1);
	return true;
}

/* Only what we hold is sure to live through it: the channels are stopped by RM calls, which take long. */
static bool stop_channels(struct mpsd_owner *owner)
{
	if (!owner->held[0])
		return false;
	uvm_va_space_down_read_rm(owner->va_space);
	uvm_va_space_stop_all_user_channels(owner->va_space);
	uvm_va_space_up_read_rm(owner->va_space);
	return true;
}

/* False: there was nothing to do it to. */
static bool perform(struct mpsd_owner *owner, enum mpsd_action step)
{
	if (step == MPSD_ACTION_KILL)
		return kill_owner(owner);
	if (step == MPSD_ACTION_STOP)
		return stop_channels(owner);
	let_files_go(owner);
	return true;
}

/* Stopping channels takes the VA space's lock, which comes before ours: so ours is not held over a step. */
static enum mpsd_action next_step(struct mpsd_owner *owner)
{
	struct mpsd_policy_params params = mpsd_params();
	enum mpsd_action step;

	mutex_lock(&owner->lock);
	step = mpsd_policy_deadline(&params, &owner->policy, mpsd_now_ns());
	if (step == MPSD_ACTION_NONE)
		mpsd_steps_arm(owner);
	mutex_unlock(&owner->lock);
	return step;
}

static void tell(struct mpsd_owner *owner, enum mpsd_action step, bool done)
{
	struct mpsd_policy_params params = mpsd_params();
	struct mpsd_record record;

	mutex_lock(&owner->lock);
	mpsd_policy_describe(&params, &owner->policy, NULL, NULL, step, &record);
	record.why = done ? MPSD_WHY_NONE : MPSD_WHY_FAILED;
	mpsd_report(owner, &record);
	mutex_unlock(&owner->lock);
}

void mpsd_steps_work(struct work_struct *work)
{
	struct mpsd_owner *owner = container_of(to_delayed_work(work), struct mpsd_owner, steps);
	enum mpsd_action step;

	while ((step = next_step(owner)) != MPSD_ACTION_NONE)
		tell(owner, step, perform(owner, step));
}

void mpsd_steps_arm(struct mpsd_owner *owner)
{
	u64 now_ns = mpsd_now_ns(), due_ns = owner->policy.deadline_ns;

	if (owner->ended || !due_ns)
		return;
	mod_delayed_work(system_unbound_wq, &owner->steps,
			 due_ns > now_ns ? nsecs_to_jiffies(due_ns - now_ns) + 1 : 0);
}
