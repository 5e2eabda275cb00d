// SPDX-License-Identifier: GPL-2.0 OR MIT
/* /dev/nvidia-uvm-mpsd, as mpsd-abi.h describes it, and the module's parameters. */
#include <linux/capability.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/pid_namespace.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/timekeeping.h>
#include <linux/uaccess.h>

#include "uvm_common.h"
#include "mpsd-glue.h"
#include "mpsd-ring.h"
#include "mpsd-uvm.h"

static uint uvm_mpsd_mode = MPSD_MODE_REPORT;
module_param(uvm_mpsd_mode, uint, 0644);
MODULE_PARM_DESC(uvm_mpsd_mode, "Fatal MMU faults: 0 stock answer, 1 record it (default), 2 isolate the client");

static uint uvm_mpsd_deadline_ms = MPSD_DEADLINE_DEFAULT_MS;
module_param(uvm_mpsd_deadline_ms, uint, 0644);
MODULE_PARM_DESC(uvm_mpsd_deadline_ms, "Time in ms after which an isolated client is killed unless mpsd evicts it");

static uint uvm_mpsd_max_sinks = MPSD_MAX_SINKS_DEFAULT;
module_param(uvm_mpsd_max_sinks, uint, 0644);
MODULE_PARM_DESC(uvm_mpsd_max_sinks, "Most sparse mappings in one address space");

static bool uvm_mpsd_nonreplayable = true;
module_param(uvm_mpsd_nonreplayable, bool, 0644);
MODULE_PARM_DESC(uvm_mpsd_nonreplayable, "Isolate faults of copy engines and PBDMA too (default on)");

static bool uvm_mpsd_stop_channels;
module_param(uvm_mpsd_stop_channels, bool, 0644);
MODULE_PARM_DESC(uvm_mpsd_stop_channels, "Stop the channels of a client that was killed (default off)");

static struct mpsd_ring ring;
static DEFINE_SPINLOCK(ring_lock);
static DECLARE_WAIT_QUEUE_HEAD(ring_wait);
static u64 loaded_ns;
static bool registered;

struct reader {
	struct mutex lock;
	u64 position;
};

/* What somebody wrote to the module's parameters may be no mode: that is off; or beyond the bounds. */
struct mpsd_policy_params mpsd_params(void)
{
	u32 mode = READ_ONCE(uvm_mpsd_mode);

	return (struct mpsd_policy_params){
		.mode = mode <= MPSD_MODE_ISOLATE ? mode : MPSD_MODE_OFF,
		.deadline_ms = clamp_t(u32, READ_ONCE(uvm_mpsd_deadline_ms), MPSD_DEADLINE_MIN_MS,
				       MPSD_DEADLINE_MAX_MS),
		.max_sinks = min_t(u32, READ_ONCE(uvm_mpsd_max_sinks), MPSD_MAX_SINKS_LIMIT),
		.nonreplayable = READ_ONCE(uvm_mpsd_nonreplayable),
		.stop_channels = READ_ONCE(uvm_mpsd_stop_channels),
	};
}

u64 mpsd_now_ns(void)
{
	return ktime_get_raw_ns();
}

void mpsd_report(struct mpsd_owner *owner, struct mpsd_record *record)
{
	struct pid *pid = owner ? get_pid(owner->pid) : NULL;

	record->time_ns = mpsd_now_ns();
	if (owner) {
		record->space = owner->id;
		record->start_ns = owner->start_ns;
		memcpy(record->comm, owner->comm, sizeof(record->comm));
	}
	spin_lock(&ring_lock);
	pid = mpsd_ring_put(&ring, record, pid);
	spin_unlock(&ring_lock);
	put_pid(pid);
	wake_up_interruptible(&ring_wait);
}

/* The number is the reader's: it is looked up here, in its pid namespace. */
static bool take(struct reader *reader, struct mpsd_record *record)
{
	struct mpsd_ring_entry entry;
	bool taken;

	spin_lock(&ring_lock);
	taken = mpsd_ring_take(&ring, &reader->position, &entry);
	if (taken)
		entry.record.pid = pid_nr_ns(entry.owner, task_active_pid_ns(current));
	spin_unlock(&ring_lock);
	if (taken)
		*record = entry.record;
	return taken;
}

static bool has_record(struct reader *reader)
{
	bool has;

	spin_lock(&ring_lock);
	has = mpsd_ring_has(&ring, READ_ONCE(reader->position));
	spin_unlock(&ring_lock);
	return has;
}

static int device_open(struct inode *inode, struct file *file)
{
	struct reader *reader;

	if (!capable(CAP_SYS_ADMIN))
		return -EPERM;
	reader = kzalloc(sizeof(*reader), GFP_KERNEL);
	if (!reader)
		return -ENOMEM;
	mutex_init(&reader->lock);
	file->private_data = reader;
	return nonseekable_open(inode, file);
}

static int device_release(struct inode *inode, struct file *file)
{
	mpsd_owners_abandon(file->private_data);
	kfree(file->private_data);
	return 0;
}

/* What is copied to nobody stays: the position moves with what has arrived. */
static ssize_t copy_records(struct reader *reader, char __user *to, size_t size)
{
	struct mpsd_record record;
	size_t done = 0;
	u64 before;

	while (size - done >= sizeof(record)) {
		before = reader->position;
		if (!take(reader, &record))
			break;
		if (copy_to_user(to + done, &record, sizeof(record))) {
			reader->position = before;
			return done ? done : -EFAULT;
		}
		done += sizeof(record);
	}
	return done;
}

static ssize_t device_read(struct file *file, char __user *to, size_t size, loff_t *offset)
{
	struct reader *reader = file->private_data;
	ssize_t done;

	if (size < sizeof(struct mpsd_record))
		return -EINVAL;
	for (;;) {
		if (mutex_lock_interruptible(&reader->lock))
			return -ERESTARTSYS;
		done = copy_records(reader, to, size);
		mutex_unlock(&reader->lock);
		if (done)
			return done;
		if (file->f_flags & O_NONBLOCK)
			return -EAGAIN;
		if (wait_event_interruptible(ring_wait, has_record(reader)))
			return -ERESTARTSYS;
	}
}

static __poll_t device_poll(struct file *file, poll_table *table)
{
	poll_wait(file, &ring_wait, table);
	return has_record(file->private_data) ? EPOLLIN | EPOLLRDNORM : 0;
}

static long query(void __user *to)
{
	struct mpsd_policy_params params = mpsd_params();
	struct mpsd_query answer = {
		.abi_version = MPSD_ABI_VERSION,
		.record_size = sizeof(struct mpsd_record),
		.ring_records = MPSD_RING_RECORDS,
		.mode = params.mode,
		.deadline_ms = params.deadline_ms,
		.max_sinks = params.max_sinks,
		.nonreplayable = params.nonreplayable,
		.stop_channels = params.stop_channels,
		.loaded_ns = loaded_ns,
		.driver = NV_VERSION_STRING,
	};

	spin_lock(&ring_lock);
	answer.written = ring.written;
	spin_unlock(&ring_lock);
	return copy_to_user(to, &answer, sizeof(answer)) ? -EFAULT : 0;
}

static long set_mode(void __user *from)
{
	struct mpsd_set_mode wanted;

	if (copy_from_user(&wanted, from, sizeof(wanted)))
		return -EFAULT;
	if (wanted.reserved || wanted.mode > MPSD_MODE_ISOLATE)
		return -EINVAL;
	WRITE_ONCE(uvm_mpsd_mode, wanted.mode);
	return 0;
}

static long error_of(enum mpsd_answer answer)
{
	switch (answer) {
	case MPSD_ANSWER_OK:
		return 0;
	case MPSD_ANSWER_INNOCENT:
		return -EPERM;
	default:
		return -EALREADY;
	}
}

static long ask_locked(struct file *file, unsigned int request, struct mpsd_owner *owner)
{
	struct mpsd_policy_params params = mpsd_params();
	const void *before = owner->acknowledged_by;
	enum mpsd_answer answer = MPSD_ANSWER_OK;

	if (request == MPSD_IOC_ACKNOWLEDGE && before && before != file->private_data)
		return -EALREADY;
	if (request == MPSD_IOC_ACKNOWLEDGE)
		answer = mpsd_policy_acknowledge(&params, &owner->policy);
	else if (request == MPSD_IOC_KILL)
		answer = mpsd_policy_kill(&owner->policy, mpsd_now_ns());
	else
		mpsd_policy_release(&owner->policy);
	if (request == MPSD_IOC_ACKNOWLEDGE && answer == MPSD_ANSWER_OK)
		owner->acknowledged_by = file->private_data;
	mpsd_steps_arm(owner);
	return error_of(answer);
}

static long ask(struct file *file, unsigned int request, void __user *from)
{
	struct mpsd_owner *owner;
	struct mpsd_target target;
	long error;

	if (copy_from_user(&target, from, sizeof(target)))
		return -EFAULT;
	if (target.reserved)
		return -EINVAL;
	owner = mpsd_owner_get_by_id(target.space);
	if (!owner)
		return -ENOENT;
	mutex_lock(&owner->lock);
	error = ask_locked(file, request, owner);
	mutex_unlock(&owner->lock);
	mpsd_owner_put(owner);
	return error;
}

static long device_ioctl(struct file *file, unsigned int request, unsigned long argument)
{
	switch (request) {
	case MPSD_IOC_QUERY:
		return query((void __user *)argument);
	case MPSD_IOC_SET_MODE:
		return set_mode((void __user *)argument);
	case MPSD_IOC_ACKNOWLEDGE:
	case MPSD_IOC_KILL:
	case MPSD_IOC_RELEASE:
		return ask(file, request, (void __user *)argument);
	default:
		return -ENOTTY;
	}
}

static const struct file_operations device_operations = {
	.owner = THIS_MODULE,
	.open = device_open,
	.release = device_release,
	.read = device_read,
	.poll = device_poll,
	.unlocked_ioctl = device_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

static struct miscdevice device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = MPSD_DEVICE_NAME,
	.fops = &device_operations,
	.mode = 0600,
};

void mpsd_init(void)
{
	int error;

	/* From the registration on somebody may ask. */
	loaded_ns = ktime_get_boottime_ns();
	error = misc_register(&device);
	registered = !error;
	if (error)
		pr_warn("mpsd: cannot create device %s (%d): only the module's parameters decide about faults\n",
			MPSD_DEVICE_NAME, error);
}

void mpsd_exit(void)
{
	void *pid;

	if (registered)
		misc_deregister(&device);
	while (mpsd_ring_drain(&ring, &pid))
		put_pid(pid);
}
