# Simulated GPUs in an environment of their own; sourced after setup.sh by test and check_gpu.

simulate_gpus() {
    # The environment of mxnet-cu112, where scripts/cuda_stubs stands in for CUDA's libraries. The one
    # that is real is NVRTC, which compiles fused kernels and needs no GPU.
    local tool
    for tool in c++ readelf; do
        type -P "$tool" >/dev/null || fail "--gpu needs $tool: install g++ and binutils"
    done
    use_gpu_venv .venv-gpu-sim test

    install_packages() {
        install "mxnet-cu112, mxamp and the test tools" "900 MB, one to three minutes" \
            --no-build-isolation mxnet-cu112 nvidia-cuda-nvrtc-cu11 --editable ".[test]"
        install GluonCV "a few seconds" --no-deps gluoncv
    }
}

build_stand_ins() {
    # Builds the stand-ins anew after a change of theirs, and makes programs load them.
    local folder=$venv/simulated_gpu said
    if [ ! -e "$folder/ready" ] || [ -n "$(find "$root/scripts/simulated_gpu" "$root/scripts/cuda_stubs" "$stamp" -newer "$folder/ready")" ]; then
        say "building two simulated GPUs, 10 to 20 s"
        rm -f "$folder/ready"
        "$venv_python" "$root/scripts/cuda_stubs" "$folder" >"$venv/ready" || fail "the simulated GPUs could not be built"
        mv "$venv/ready" "$folder/ready"
    fi
    while IFS= read -r said; do export "${said?}"; done <"$folder/ready"
}
