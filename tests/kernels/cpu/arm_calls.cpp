// Calls functions of a library for aarch64 as another process asks: arm_calls LIBRARY FILE ADDRESS SIZE.
//
// FILE is memory that both processes have at ADDRESS, so that pointers mean the same in both. Each line that is read is a function's
// name, its whole numbers and pointers, a bar, and its floats as bits; the line that is written is what it returns.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

constexpr size_t MOST_WHOLE = 24, MOST_FLOATS = 4;

// ARM's calling convention numbers registers for floats apart from those for whole numbers, of which each takes 8 bytes, in registers
// or behind them: a function reads as many as it has, whatever else it is given.
template <size_t... WHOLE, size_t... FLOATS>
int64_t call(void* function, const int64_t* whole, const float* floats, std::index_sequence<WHOLE...>,
             std::index_sequence<FLOATS...>) {
    using Function = int64_t (*)(decltype(WHOLE, int64_t{})..., decltype(FLOATS, float{})...);
    return reinterpret_cast<Function>(function)(whole[WHOLE]..., floats[FLOATS]...);
}

int64_t call(void* library, std::istringstream& said) {
    std::string name, word;
    said >> name;
    int64_t whole[MOST_WHOLE] = {};
    float floats[MOST_FLOATS] = {};
    for (size_t i = 0; said >> word && word != "|"; ++i) whole[i] = std::stoll(word);
    for (size_t i = 0; said >> word; ++i) {
        const auto bits = static_cast<uint32_t>(std::stoul(word));
        std::memcpy(floats + i, &bits, sizeof bits);
    }
    void* const function = dlsym(library, name.c_str());
    if (function == nullptr) throw std::runtime_error(dlerror());
    return call(function, whole, floats, std::make_index_sequence<MOST_WHOLE>{}, std::make_index_sequence<MOST_FLOATS>{});
}

}  // namespace

int main(int, char** given) {
    void* const library = dlopen(given[1], RTLD_NOW);
    if (library == nullptr) return std::cerr << dlerror() << '\n', 1;
    const int file = open(given[2], O_RDWR);
    auto* const address = reinterpret_cast<void*>(std::strtoull(given[3], nullptr, 10));
    const size_t size = std::strtoull(given[4], nullptr, 10);
    if (mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0) != address) return 2;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream said(line);
        std::cout << call(library, said) << std::endl;
    }
}
