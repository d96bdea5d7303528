// A plugin of qemu that counts the instructions that the emulated program executes, and prints the number at its end.
// The few declarations of qemu's plugin interface that it needs are repeated here: Debian's qemu-user comes without them.

#include <stdint.h>
#include <stdio.h>

typedef uint64_t plugin_id;
struct block;
extern void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct block *));
extern void qemu_plugin_register_vcpu_tb_exec_cb(struct block *, void (*)(unsigned, void *), int flags, void *data);
extern void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *data);
extern size_t qemu_plugin_tb_n_insns(const struct block *);

int qemu_plugin_version = INTERFACE;

static uint64_t executed;

static void run(unsigned cpu, void *instructions) {
    (void)cpu;
    __atomic_fetch_add(&executed, (uint64_t)instructions, __ATOMIC_RELAXED);
}

static void translated(plugin_id id, struct block *block) {
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_cb(block, run, 0, (void *)(uint64_t)qemu_plugin_tb_n_insns(block));
}

static void print(plugin_id id, void *data) {
    (void)id, (void)data;
    printf("%llu\n", (unsigned long long)executed);
    fflush(stdout);  // qemu ends without it
}

int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv) {
    (void)info, (void)argc, (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, print, 0);
    return 0;
}
