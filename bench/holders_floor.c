/* The least that a search for holders asks of the kernel, for bench/holders.py: each process's descriptors listed, and
 * one statx() for each of them, which alone tells what device is behind it.
 *
 *     holders_floor WORKERS NODE
 *
 * Prints the PIDs of those that have NODE's inode open. Looks at no mapping and says nothing of who it is. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

struct entry {
    unsigned long inode;
    long offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

static struct statx wanted;

static int holds(int proc, const char *pid)
{
    static char entries[1 << 16];
    char path[32];
    int held = 0, place;
    long got;

    snprintf(path, sizeof path, "%s/fd", pid);
    place = openat(proc, path, O_RDONLY | O_DIRECTORY);
    if (place < 0)
        return 0;
    while ((got = syscall(SYS_getdents64, place, entries, sizeof entries)) > 0)
        for (long at = 0; at < got; at += ((struct entry *)(entries + at))->length) {
            const char *name = ((struct entry *)(entries + at))->name;
            struct statx seen;
            if (name[0] != '.' && statx(place, name, AT_STATX_DONT_SYNC, STATX_TYPE, &seen) == 0)
                held |= seen.stx_ino == wanted.stx_ino && seen.stx_dev_major == wanted.stx_dev_major &&
                        seen.stx_dev_minor == wanted.stx_dev_minor;
        }
    close(place);
    return held;
}

int main(int argc, char **argv)
{
    int workers = argc == 3 ? atoi(argv[1]) : 0, number = 0, proc = open("/proc", O_RDONLY | O_DIRECTORY);
    DIR *processes;
    struct dirent *one;

    if (workers < 1 || proc < 0 || statx(AT_FDCWD, argv[2], 0, STATX_TYPE, &wanted) != 0)
        return 2;
    while (number < workers - 1 && fork() != 0)
        number++;
    /* Each lists /proc for itself, and looks at its share by the PID. */
    processes = opendir("/proc");
    while (processes && (one = readdir(processes))) {
        int pid = atoi(one->d_name);
        if (pid > 0 && pid % workers == number && holds(proc, one->d_name))
            printf("%d\n", pid);
    }
    fflush(stdout);
    while (wait(NULL) > 0)
        ;
    return 0;
}
