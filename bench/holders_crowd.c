/* A crowd of innocent processes for bench/holders.py: each has so many files open, as a server's worker has.
 *
 *     holders_crowd PROCESSES DESCRIPTORS
 *
 * Of ten descriptors six are sockets or pipes, two memory, one a file and one a device. Prints "ready" when all are
 * there, and ends with all of them when its input is closed. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

static void fill(int count)
{
    for (int i = 0; i < count; i++) {
        int fd = -1;
        switch (i % 10) {
        case 0: case 1: case 2: fd = socket(AF_UNIX, SOCK_STREAM, 0); break;
        case 3: case 4: case 5: fd = eventfd(0, 0); break;
        case 6: case 7: fd = memfd_create("crowd", 0); break;
        case 8: fd = open("/etc/passwd", O_RDONLY); break;
        default: fd = open("/dev/null", O_RDWR); break;
        }
        if (fd < 0) {
            perror("a descriptor could not be had");
            exit(1);
        }
    }
}

int main(int argc, char **argv)
{
    int processes = argc > 1 ? atoi(argv[1]) : 0, descriptors = argc > 2 ? atoi(argv[2]) : 0;
    struct rlimit limit = {1 << 20, 1 << 20};
    int told[2];
    char byte = 0;

    setrlimit(RLIMIT_NOFILE, &limit);
    if (processes < 1 || pipe(told) != 0)
        return 2;
    for (int i = 0; i < processes; i++) {
        pid_t pid = fork();
        if (pid < 0) {
            perror("a process could not be had");
            kill(0, SIGTERM);
            return 1;
        }
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            fill(descriptors);
            if (write(told[1], &byte, 1) != 1)
                return 1;
            for (;;)
                pause();
        }
    }
    close(told[1]);
    for (int i = 0; i < processes; i++)
        if (read(told[0], &byte, 1) != 1)
            return 1;
    puts("ready");
    fflush(stdout);
    while (read(0, &byte, 1) > 0)
        ;
    return 0;
}
