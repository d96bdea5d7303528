// Replays calls of the kernels' library that `emulated.py` has written: replay LIBRARY CALLS RESULTS

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static FILE *file;

static int64_t number() {
    int64_t n;
    if (fread(&n, 8, 1, file) != 1) exit(2);
    return n;
}

// Integers and pointers go by registers and then by the stack, floats by registers of their own: one type fits all
typedef int64_t (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t, float, float);

int main(int, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    file = fopen(argv[2], "rb");
    const int64_t count = number();
    int64_t *sizes = new int64_t[count];
    char **buffers = new char *[count];
    for (int64_t i = 0; i < count; i++) {
        sizes[i] = number();
        buffers[i] = (char *)aligned_alloc(64, (sizes[i] + 127) / 64 * 64);
        if (sizes[i] && fread(buffers[i], sizes[i], 1, file) != 1) return 2;
    }
    for (int64_t left = number(); left > 0; left--) {  // pointers inside buffers
        const int64_t buffer = number(), offset = number(), target = number();
        memcpy(buffers[buffer] + offset, &buffers[target], 8);
    }
    for (int64_t left = number(); left > 0; left--) {
        char name[32];
        if (fread(name, 32, 1, file) != 1) return 2;
        int64_t a[14] = {};
        float f[2] = {};
        for (int64_t i = 0, kinds = number(), ints = 0, floats = 0; i < kinds; i++) {
            const int64_t kind = number(), value = number();
            if (kind == 2) memcpy(&f[floats++], &value, 4);
            else a[ints++] = kind == 1 ? (int64_t)buffers[value] : value;
        }
        const Function call = (Function)dlsym(library, name);
        if (!call) return fprintf(stderr, "%s\n", dlerror()), 1;
        call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], f[0], f[1]);
    }
    FILE *out = fopen(argv[3], "wb");
    for (int64_t i = 0; i < count; i++) fwrite(buffers[i], 1, sizes[i], out);
    return fclose(out);
}
