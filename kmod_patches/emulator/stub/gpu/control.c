// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * /proc/mpsd-gpu: what a test asks of the GPU and sees of it. Written, one command a line:
 *
 *   fault KIND ADDRESS CHANNEL ENGINE TYPE ACCESS CLIENT GPC UNIT [s]
 *       KIND r (replayable) or n, UNIT g (GPC) or h (hub), numbers hexadecimal, those of the hardware;
 *       CHANNEL: the number of the channel whose instance block the packet names. The access that
 *       faults is tried again at each replay (or clear faulted) until it succeeds or is cancelled;
 *       "s": it never succeeds
 *   walk CLIENT OBJECT ADDRESS
 *       what the page tables of a client's address space say, as two deeds: big page, small page
 *   digest CLIENT OBJECT
 *       all that they say, as one number
 *   forget
 *       the deeds so far
 *   quiet
 *       until then faults, replays and accesses that go on are counted, and not kept
 *   mask, unmask
 *       UVM hears of no fault in between: so many are there at once
 *
 * Read: "space CLIENT OBJECT DIRECTORY SYSMEM" for each with a page directory, "deed NUMBER NAME ADDRESS
 * DIRECTORY FIRST SECOND NS" for what was done and when, "lost COUNT" if there was more than is kept.
 * /proc/mpsd-gpu-tally: "NAME COUNT" for each kind of deed, lost ones too, and of accesses that stand still.
 */
#include <linux/ktime.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "gpu.h"

#define NAME "mpsd-gpu"
#define TALLY "mpsd-gpu-tally"
#define KEPT 65536
#define LINE 128

static const char *const deeds[] = {
	[GPU_INVALIDATE] = "invalidate",
	[GPU_REPLAY] = "replay",
	[GPU_CANCEL_VA] = "cancel-va",
	[GPU_CANCEL_INSTANCE] = "cancel-instance",
	[GPU_CLEAR_FAULTED] = "clear-faulted",
	[GPU_REPORTED] = "reported",
	[GPU_STOPPED] = "stopped",
	[GPU_TROUBLE] = "trouble",
	[GPU_WENT_ON] = "went-on",
	[GPU_WALKED] = "walked",
	[GPU_FAULTED] = "faulted",
	[GPU_DIGESTED] = "digested",
};

struct deed {
	u64 address, directory, ns;
	u32 deed, first, second;
};

static struct deed *kept;
static bool quiet;
static u32 done, lost, tally[ARRAY_SIZE(deeds)];
static DEFINE_SPINLOCK(lock);

void gpu_did(enum gpu_deed deed, u64 address, u64 directory, u32 first, u32 second)
{
	u64 now = ktime_get_ns();

	spin_lock(&lock);
	tally[deed]++;
	if (quiet && (deed == GPU_FAULTED || deed == GPU_REPLAY || deed == GPU_WENT_ON))
		;
	else if (done < KEPT)
		kept[done++] = (struct deed){ address, directory, now, deed, first, second };
	else
		lost++;
	spin_unlock(&lock);
}

static void show_spaces(struct seq_file *file)
{
	struct gpu_space *space;

	mutex_lock(&gpu_spaces_lock);
	list_for_each_entry(space, &gpu_spaces, node)
		if (space->set)
			seq_printf(file, "space %x %x %llx %d\n", space->client, space->object,
				   space->directory, space->sysmem);
	mutex_unlock(&gpu_spaces_lock);
}

static int show(struct seq_file *file, void *unused)
{
	u32 number, count;

	show_spaces(file);
	spin_lock(&lock);
	count = done;
	spin_unlock(&lock);
	for (number = 0; number < count; number++)
		seq_printf(file, "deed %u %s %llx %llx %x %x %llx\n", number, deeds[kept[number].deed],
			   kept[number].address, kept[number].directory, kept[number].first,
			   kept[number].second, kept[number].ns);
	if (lost)
		seq_printf(file, "lost %u\n", lost);
	return 0;
}

static int show_tally(struct seq_file *file, void *unused)
{
	u32 deed;

	for (deed = 0; deed < ARRAY_SIZE(deeds); deed++)
		seq_printf(file, "%s %u\n", deeds[deed], READ_ONCE(tally[deed]));
	seq_printf(file, "standing %u\n", gpu_accesses_standing());
	return 0;
}

static int inject(const char *line)
{
	struct gpu_fault fault = { .timestamp = ktime_get_ns() };
	char kind, unit, mood = 0;
	u32 channel;

	if (sscanf(line, "fault %c %llx %x %x %x %x %x %x %c %c", &kind, &fault.address, &channel, &fault.engine,
		   &fault.type, &fault.access, &fault.client, &fault.gpc, &unit, &mood) < 9)
		return -EINVAL;
	fault.stubborn = mood == 's';
	fault.instance = GPU_INSTANCE(channel);
	fault.replayable = kind == 'r';
	fault.hub = unit == 'h';
	return gpu_access(&fault, channel);
}

static int walk_space(const struct gpu_space *space, u64 address)
{
	struct gpu_walk found = { 0 };
	int big, error;

	for (big = 1; big >= 0; big--) {
		error = gpu_walk(space, address, big, &found);
		if (error)
			return error;
		gpu_did(GPU_WALKED, address, found.pte, found.level, big);
	}
	return 0;
}

static int walk(const char *line)
{
	struct gpu_space *space;
	u32 client, object;
	int error = -ENOENT;
	u64 address;

	if (sscanf(line, "walk %x %x %llx", &client, &object, &address) != 3)
		return -EINVAL;
	mutex_lock(&gpu_spaces_lock);
	list_for_each_entry(space, &gpu_spaces, node)
		if (space->set && space->client == client && space->object == object)
			error = walk_space(space, address);
	mutex_unlock(&gpu_spaces_lock);
	return error;
}

static int digest(const char *line)
{
	struct gpu_space *space;
	int error = -ENOENT;
	u32 client, object, count;
	u64 number;

	if (sscanf(line, "digest %x %x", &client, &object) != 2)
		return -EINVAL;
	mutex_lock(&gpu_spaces_lock);
	list_for_each_entry(space, &gpu_spaces, node)
		if (space->set && space->client == client && space->object == object)
			error = gpu_digest(space, &number, &count);
	mutex_unlock(&gpu_spaces_lock);
	if (!error)
		gpu_did(GPU_DIGESTED, number, 0, count, 0);
	return error;
}

static int forget(void)
{
	spin_lock(&lock);
	done = lost = 0;
	quiet = false;
	memset(tally, 0, sizeof(tally));
	spin_unlock(&lock);
	return 0;
}

static int obey(const char *line)
{
	if (!strcmp(line, "forget"))
		return forget();
	if (!strcmp(line, "quiet")) {
		quiet = true;
		return 0;
	}
	if (!strcmp(line, "mask") || !strcmp(line, "unmask")) {
		gpu_faults_mask(line[0] == 'm');
		return 0;
	}
	if (line[0] == 'd')
		return digest(line);
	return line[0] == 'w' ? walk(line) : inject(line);
}

static ssize_t take(struct file *file, const char __user *from, size_t size, loff_t *position)
{
	char line[LINE];
	int error;

	if (size >= sizeof(line))
		return -E2BIG;
	if (copy_from_user(line, from, size))
		return -EFAULT;
	line[size] = 0;
	error = obey(strim(line));
	return error ? error : size;
}

static int open_show(struct inode *inode, struct file *file)
{
	return single_open(file, show, NULL);
}

static const struct proc_ops operations = {
	.proc_open = open_show,
	.proc_read = seq_read,
	.proc_lseek = seq_lseek,
	.proc_release = single_release,
	.proc_write = take,
};

int gpu_control_open(void)
{
	kept = kvcalloc(KEPT, sizeof(*kept), GFP_KERNEL);
	if (!kept)
		return -ENOMEM;
	if (!proc_create_single(TALLY, 0400, NULL, show_tally))
		return -ENOMEM;
	return proc_create(NAME, 0600, NULL, &operations) ? 0 : -ENOMEM;
}

void gpu_control_close(void)
{
	remove_proc_entry(NAME, NULL);
	remove_proc_entry(TALLY, NULL);
	kvfree(kept);
}
