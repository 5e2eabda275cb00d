// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Allocations that fail, one at a time, for a kernel without fault injection. While some thread is inside a
 * given function, every call that it makes of an allocator (the kernel's, or UVM's of video memory and of
 * pushes) is counted, and the n-th comes back at once with its error: by kprobes, so the module under test is
 * the one that ships.
 *
 * /proc/mpsd-failing, written: "FUNCTION N" (N 0: only count; "FUNCTION N all": that and every later one) or
 * "off". Read: "calls COUNT failed NAME".
 */
#include <linux/kprobes.h>
#include <linux/linkage.h>
#include <linux/preempt.h>
#include <linux/proc_fs.h>
#include <linux/sched.h>
#include <linux/seq_file.h>
#include <linux/uaccess.h>

#include "gpu.h"

#define NAME "mpsd-failing"
#define LINE 96

static int counted(struct kprobe *probe, struct pt_regs *regs);

/* Without a handler behind the instruction the probe might be turned into a jump, which could not return. */
static void behind(struct kprobe *probe, struct pt_regs *regs, unsigned long flags)
{
}

#define FAILS(function, error) \
	{ { .symbol_name = function, .pre_handler = counted, .post_handler = behind }, error, false }

static struct allocator {
	struct kprobe probe;
	unsigned long error;
	bool armed;
} allocators[] = {
	FAILS("__kmalloc", 0),
	FAILS("kmalloc_trace", 0),
	FAILS("kmem_cache_alloc_trace", 0),
	FAILS("kmalloc_large", 0),
	FAILS("kmem_cache_alloc", 0),
	FAILS("vmalloc", 0),
	FAILS("vzalloc", 0),
	FAILS("__vmalloc", 0),
	FAILS("__alloc_pages", 0),
	FAILS("dma_map_page_attrs", ~0ul),
	FAILS("uvm_pmm_gpu_alloc", NV_ERR_NO_MEMORY),
	FAILS("nvUvmInterfacePmaAllocPages", NV_ERR_NO_MEMORY),
	FAILS("__uvm_push_begin_acquire_with_info", NV_ERR_NO_MEMORY),
};

static char function[LINE];
static struct task_struct *inside;
static u32 fail_at, calls;
static const char *failed;
static bool on, all;
static DEFINE_MUTEX(lock);

/* Returns at once, to whoever called the function on whose first instruction a probe sits. */
void mpsd_failing_return(void);
asm(".pushsection .text\n"
    ".type mpsd_failing_return, @function\n"
    "mpsd_failing_return:\n"
    ASM_RET
    ".size mpsd_failing_return, .-mpsd_failing_return\n"
    ".popsection\n");

static int counted(struct kprobe *probe, struct pt_regs *regs)
{
	struct allocator *one = container_of(probe, struct allocator, probe);

	if (READ_ONCE(inside) != current || !in_task())
		return 0;
	calls++;
	if (!fail_at || calls < fail_at || (calls > fail_at && !all))
		return 0;
	failed = probe->symbol_name;
	regs->ax = one->error;
	regs->ip = (unsigned long)mpsd_failing_return;
	return 1;
}

static int enters(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	return cmpxchg(&inside, NULL, current) != NULL;
}

static int leaves(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	WRITE_ONCE(inside, NULL);
	return 0;
}

static struct kretprobe whole;

static void disarm(void)
{
	int at;

	if (!on)
		return;
	unregister_kretprobe(&whole);
	for (at = 0; at < ARRAY_SIZE(allocators); at++) {
		if (allocators[at].armed)
			unregister_kprobe(&allocators[at].probe);
		allocators[at].armed = false;
	}
	on = false;
}

/* A probe that has been used once is used again as if it were new. What the kernel has not is not armed. */
static int arm(void)
{
	int at, error;

	for (at = 0; at < ARRAY_SIZE(allocators); at++) {
		allocators[at].probe.addr = NULL;
		allocators[at].probe.flags = 0;
		allocators[at].armed = !register_kprobe(&allocators[at].probe);
	}
	on = true;
	whole = (struct kretprobe){ .kp.symbol_name = function, .entry_handler = enters, .handler = leaves };
	error = register_kretprobe(&whole);
	if (!error)
		return 0;
	for (at = 0; at < ARRAY_SIZE(allocators); at++)
		if (allocators[at].armed)
			unregister_kprobe(&allocators[at].probe);
	on = false;
	return error;
}

static int obey(const char *line)
{
	char word[LINE] = "";
	u32 number;

	disarm();
	if (!strcmp(line, "off"))
		return 0;
	if (sscanf(line, "%95s %u %95s", function, &number, word) < 2)
		return -EINVAL;
	inside = NULL;
	failed = NULL;
	calls = 0;
	fail_at = number;
	all = !strcmp(word, "all");
	return arm();
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
	mutex_lock(&lock);
	error = obey(strim(line));
	mutex_unlock(&lock);
	return error ? error : size;
}

static int show(struct seq_file *file, void *unused)
{
	int at;

	seq_printf(file, "calls %u failed %s\n", calls, failed ? failed : "nothing");
	for (at = 0; at < ARRAY_SIZE(allocators); at++)
		if (allocators[at].armed)
			seq_printf(file, "armed %s\n", allocators[at].probe.symbol_name);
	return 0;
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

int gpu_failing_open(void)
{
	return proc_create(NAME, 0600, NULL, &operations) ? 0 : -ENOMEM;
}

void gpu_failing_close(void)
{
	remove_proc_entry(NAME, NULL);
	disarm();
}
